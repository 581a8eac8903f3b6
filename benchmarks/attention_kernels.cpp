// Times the CPU attention kernels alone, with no framework in the process: forward and backward of the calls of
// docs/performance.md, in GFLOP/s (4 and 10 operations a score element and dim; half of them if causal).
// Built with -DFULMEN_BUILD_BENCHMARKS=ON.
//   attention_kernels [instruction set [milliseconds a measurement [text of a row, such as 'd128' or 'f32']]]
// The comparison with other software is `fulmen bench attention`.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "core/half.h"
#include "core/parallel.h"
#include "executors/cpu/attention/attention.h"
#include "executors/cpu/dispatch.h"

namespace {

using namespace fulmen;

struct Row {
  const char* name;
  int64_t batch, heads, key_heads, query_len, key_len, head_dim;
  bool causal;
};

const Row rows[] = {{"b1 h12 s1024 d64 causal", 1, 12, 12, 1024, 1024, 64, true},  {"b4 h8 s512 d64 causal", 4, 8, 8, 512, 512, 64, true},
                    {"b1 h1 s4096 d64 causal", 1, 1, 1, 4096, 4096, 64, true},     {"b1 h2 s4096 d128 causal", 1, 2, 2, 4096, 4096, 128, true},
                    {"gqa 8/2 s1024 d128 causal", 1, 8, 2, 1024, 1024, 128, true}, {"b8 h12 s197 d64", 8, 12, 12, 197, 197, 64, false},
                    {"b8 h4 s64 d32 causal", 8, 4, 4, 64, 64, 32, true},           {"decode h32 1 x 4096 d128", 1, 32, 32, 1, 4096, 128, false}};

struct Buffer {
  explicit Buffer(size_t bytes) : data(std::aligned_alloc(64, bytes / 64 * 64 + 128)) { std::memset(data, 0, bytes / 64 * 64 + 128); }
  ~Buffer() { std::free(data); }
  Buffer(const Buffer&) = delete;
  void* data;
};

void fill(void* data, DType dtype, int64_t count) {
  uint32_t state = 12345;
  for (int64_t i = 0; i < count; ++i) {
    state = state * 1664525u + 1013904223u;
    const float x = static_cast<float>(state >> 8) * 1.1920929e-7f - 1.0f;
    if (dtype == DType::f32) static_cast<float*>(data)[i] = x;
    else if (dtype == DType::bf16) static_cast<bf16*>(data)[i] = bf16(x);
    else static_cast<f16*>(data)[i] = f16(x);
  }
}

template <class F>
double median_ms(double budget_ms, const F& body) {
  using clock = std::chrono::steady_clock;
  body();
  std::vector<double> times;
  const auto start = clock::now();
  do {
    const auto begin = clock::now();
    body();
    times.push_back(std::chrono::duration<double, std::milli>(clock::now() - begin).count());
  } while (std::chrono::duration<double, std::milli>(clock::now() - start).count() < budget_ms || times.size() < 3);
  std::nth_element(times.begin(), times.begin() + static_cast<int64_t>(times.size() / 2), times.end());
  return times[times.size() / 2];
}

void measure(const Row& row, DType dtype, double budget_ms) {
  SdpaCall call;
  call.query = contiguous_type(dtype, {row.batch, row.heads, row.query_len, row.head_dim});
  call.key = call.value = contiguous_type(dtype, {row.batch, row.key_heads, row.key_len, row.head_dim});
  call.is_causal = row.causal;
  call.scale = 1.0 / std::sqrt(static_cast<double>(row.head_dim));
  const TensorType lse_type = contiguous_type(DType::f32, {row.batch, row.heads, row.query_len});
  Buffer query(call.query.bytes()), key(call.key.bytes()), value(call.key.bytes()), out(call.query.bytes()), out_grad(call.query.bytes()), lse(lse_type.bytes());
  Buffer query_grad(call.query.bytes()), key_grad(call.key.bytes()), value_grad(call.key.bytes());
  fill(query.data, dtype, call.query.element_count());
  fill(key.data, dtype, call.key.element_count());
  fill(value.data, dtype, call.key.element_count());
  fill(out_grad.data, dtype, call.query.element_count());
  const void* inputs[sdpa_backward_operand_count] = {query.data, key.data, value.data};
  inputs[sdpa_out] = out.data;
  inputs[sdpa_lse] = lse.data;
  inputs[sdpa_out_grad] = out_grad.data;
  void* forward_outputs[2] = {out.data, lse.data};
  void* backward_outputs[sdpa_gradient_count] = {query_grad.data, key_grad.data, value_grad.data};
  const auto forward = cpu::make_attention_forward(call, call.query, &lse_type);
  const auto backward = cpu::make_attention_backward(call, call.query, call.query, {&call.query, &call.key, &call.value});
  Buffer forward_space(forward->workspace_bytes()), backward_space(backward->workspace_bytes());
  const double forward_ms = median_ms(budget_ms, [&] { forward->run({nullptr, 0, forward_space.data}, inputs, forward_outputs); });
  const double backward_ms = median_ms(budget_ms, [&] { backward->run({nullptr, 0, backward_space.data}, inputs, backward_outputs); });
  const double flops = 4.0 * static_cast<double>(row.batch * row.heads * row.query_len * row.key_len * row.head_dim) / (row.causal ? 2 : 1);
  std::printf("%-28s %-5s forward %8.3f ms %6.0f GFLOP/s   backward %8.3f ms %6.0f GFLOP/s   workspace %5.1f + %5.1f MiB\n", row.name,
              std::string(dtype_name(dtype)).c_str(), forward_ms, flops / forward_ms / 1e6, backward_ms, 2.5 * flops / backward_ms / 1e6,
              static_cast<double>(forward->workspace_bytes()) / 1048576, static_cast<double>(backward->workspace_bytes()) / 1048576);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1) {
    const auto& isas = cpu::available_isas();
    const auto asked = std::find_if(isas.begin(), isas.end(), [&](cpu::Isa isa) { return cpu::isa_name(isa) == argv[1]; });
    if (asked == isas.end()) {
      std::fprintf(stderr, "this machine cannot run %s; it can run:", argv[1]);
      for (cpu::Isa isa : isas) std::fprintf(stderr, " %s", std::string(cpu::isa_name(isa)).c_str());
      std::fprintf(stderr, "\n");
      return 2;
    }
    cpu::force_isa(*asked);
  }
  const double budget_ms = argc > 2 ? std::atof(argv[2]) : 200.0;
  std::printf("%s, %d threads (%s)\n", std::string(cpu::isa_name(cpu::chosen_isa())).c_str(), thread_count(), thread_backend());
  const std::string only = argc > 3 ? argv[3] : "";
  for (const Row& row : rows)
    for (DType dtype : {DType::f32, DType::bf16, DType::f16})
      if ((row.name + std::string(" ") + std::string(dtype_name(dtype))).find(only) != std::string::npos) measure(row, dtype, budget_ms);
  return 0;
}
