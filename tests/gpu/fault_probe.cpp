// Which calls still need the cures of executors/cudnn/known_faults.cpp: runs the backward without them and compares with
// float64. Not a test of Fulmen: it measures the library at hand, so it runs only where FULMEN_GPU_PROBE is set to
// "SHARD/COUNT" (0/1 for all), and prints what it found; the table's rows are written by what it prints.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>

#include "tests/gpu/attention_run.h"
#include "tests/unit/executors/cudnn_cases.h"

namespace fulmen::gpu_tests {
namespace {

struct Shard {
  int index = 0, count = 0;
  int next = 0;
  bool mine() { return count > 0 && next++ % count == index; }
};

Shard shard() {
  Shard shard;
  if (const char* text = std::getenv("FULMEN_GPU_PROBE")) std::sscanf(text, "%d/%d", &shard.index, &shard.count);
  return shard;
}

const cudnn::Context& without(const char* faults) {
  cudnn::Options options = cudnn::options_from_environment();
  options.plan_store = false;
  options.ignored_faults = faults;
  return *new cudnn::Context(options);
}

std::vector<Data> draws() {
  std::vector<Data> draws;
  for (const double shift : {0.0, -20.0, -120.0, -1000.0, 60.0}) {
    Data data;
    data.seed = 1 + draws.size();
    data.shift = shift;
    if (shift != 0) data.query_scale = data.key_scale = 0.1;
    data.closed = shift == 0 ? 0.3 : 0;
    draws.push_back(data);
  }
  Data tiny;  // a key channel near 70, gradients near 1e-8
  tiny.shift = 70;
  tiny.grad_scale = 1e-8;
  draws.push_back(tiny);
  Data closed;
  closed.closed_rows = 3;
  draws.push_back(closed);
  return draws;
}

void probe(const cudnn::Context& context, const std::string& line) {
  const cudnn::Case c = cudnn::parse_case("x " + line);
  AttentionRun run(context, c.call, c.layouts);
  std::string wrong;
  if (run.claimed()) {
    for (const Data& data : draws()) {
      const Outcome outcome = run.compare(data);
      if (!outcome.trouble.empty())
        wrong += " | shift " + std::to_string(static_cast<int>(data.shift)) + (data.closed_rows ? " closed" : "") + ": " +
                 outcome.trouble.substr(0, 120);
    }
  } else {
    wrong = " refused: " + run.refusal().substr(0, 160);
  }
  std::printf("probe: %s %s%s\n", wrong.empty() ? "right" : run.claimed() ? "WRONG" : "refused", line.c_str(), wrong.c_str());
}

std::string line_of(const std::string& form, int queries, int keys, int dim, int value_dim) {
  const auto tensor = [](const char* name, const char* dtype, int length, int size) {
    return std::string(name) + "=" + dtype + "[2,2," + std::to_string(length) + "," + std::to_string(size) + "] ";
  };
  std::string line = tensor("q", "bf16", queries, dim) + tensor("k", "bf16", keys, dim) + tensor("v", "bf16", keys, value_dim);
  const std::string sizes = std::to_string(queries) + "," + std::to_string(keys) + "]";
  if (form == "bias") line += "mask=bf16[1,1," + sizes + " ";
  if (form == "bool") line += "mask=bool[2,1," + sizes + " ";
  if (form == "learned") line += "mask=bf16[1,2," + sizes + "! ";
  if (form == "causal") line += "causal ";
  if (form == "window") line += "window=40:0 ";
  return line + "training";
}

TEST(GpuFaultProbe, TailsWithoutLengths) {
  Shard shard = gpu_tests::shard();
  if (shard.count == 0) GTEST_SKIP() << "FULMEN_GPU_PROBE isn't set";
  const cudnn::Context& context = without("masked-half-tile,open-query-tile,open-tail");
  const int lengths[] = {1, 2, 5, 16, 32, 63, 64, 65, 96, 100, 127, 128, 129, 160, 191, 192, 193, 197, 256, 320, 384, 448, 640, 704};
  for (const char* form : {"plain", "causal", "bias", "learned"})
    for (const int length : lengths)
      for (const auto& [dim, value_dim] : {std::pair{64, 64}, {128, 128}})
        if (shard.mine()) probe(context, line_of(form, length, length, dim, value_dim));
  for (const int length : {65, 96, 128, 192, 197, 320})
    for (const auto& [dim, value_dim] : {std::pair{32, 32}, {72, 72}, {192, 128}, {256, 256}})
      for (const char* form : {"plain", "causal"})
        if (shard.mine()) probe(context, line_of(form, length, length, dim, value_dim));
  for (const int queries : {1, 64, 100, 128, 192, 200})
    for (const int keys : {1, 64, 100, 128, 192, 200, 300})
      for (const char* form : {"plain", "bool", "window", "causal"})
        if (queries != keys && shard.mine() && (std::string(form) != "window" || queries <= keys))
          probe(context, line_of(form, queries, keys, 64, 64));
}

TEST(GpuFaultProbe, MaskRows) {
  Shard shard = gpu_tests::shard();
  if (shard.count == 0) GTEST_SKIP() << "FULMEN_GPU_PROBE isn't set";
  const cudnn::Context& context = without("repeated-mask-row");
  for (const char* mask : {"bool[2,1,1,", "bool[1,1,1,", "bool[2,2,1,", "bf16[1,1,1,", "bf16[2,1,1,", "f32[1,1,1,", "bf16[1,2,1,!"})
    for (const int keys : {64, 100, 128, 197, 256, 512})
      for (const int queries : {64, 100, 256, 512})
        for (const int dim : {64, 128})
          if (shard.mine()) {
            std::string form = mask;
            const bool learned = form.back() == '!';
            if (learned) form.pop_back();
            probe(context, "q=bf16[2,2," + std::to_string(queries) + "," + std::to_string(dim) + "] k=bf16[2,2," + std::to_string(keys) +
                               "," + std::to_string(dim) + "] mask=" + form + std::to_string(keys) + "]" + (learned ? "!" : "") + " training");
          }
}

}  // namespace
}  // namespace fulmen::gpu_tests
