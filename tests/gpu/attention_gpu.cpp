// The cuDNN executor on a GPU: numbers of every form against float64, the store, faults, capture, threads, determinism,
// the described verdict against the one with a handle, and a fuzz. FULMEN_FUZZ_CALLS and FULMEN_FUZZ_SECONDS bound the
// fuzz. Built as fulmen_gpu_tests; see tools/gpu_run.sh.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <thread>

#include "claiming/targets.h"
#include "core/error.h"
#include "tests/gpu/attention_run.h"
#include "tests/unit/executors/cudnn_cases.h"

namespace fulmen::gpu_tests {
namespace {

using cudnn::Case;
using cudnn::Context;
using cudnn::Options;
using cudnn::parse_case;

Options options() {
  Options options = cudnn::options_from_environment();
  options.plan_store = false;
  return options;
}

const Context& context() {
  static const Context& context = *new Context(options());
  return context;
}

// Every call that can runs on a plan that many lengths share.
const Context& sharing_context() {
  static const Context& context = *[] {
    Options sharing = options();
    sharing.exact_lengths = 0;
    return new Context(sharing);
  }();
  return context;
}

Data data_of(uint64_t seed) {
  Data data;
  data.seed = seed;
  return data;
}

void expect_right(const std::string& line, const Data& data = {}, bool may_refuse = false) {
  const Case c = parse_case("x " + line);
  AttentionRun run(context(), c.call, c.layouts);
  const Outcome outcome = run.compare(data);
  if (!may_refuse) {
    EXPECT_EQ(outcome.refused, "") << line;
  }
  EXPECT_EQ(outcome.trouble, "") << line;
  std::string errors;
  char text[64];
  for (const auto& [name, error] : outcome.error) {
    std::snprintf(text, sizeof text, " %s %.2g", name.c_str(), error);
    errors += text;
  }
  std::printf("  %-100s %s%s\n", line.c_str(), outcome.refused.empty() ? "" : outcome.refused.c_str(), errors.c_str());
}

TEST(GpuNumbers, PlainForms) {
  for (const char* line : {
           "q=bf16[2,4,256,64] training", "q=f16[2,4,256,64] training", "q=bf16[2,4,256,64] causal training",
           "q=bf16[2,4,256,128] causal training", "q=bf16[2,8,256,128] k=bf16[2,2,256,128] causal training",
           "q=bf16[2,4,256,64] k=bf16[2,1,256,64] training", "q=bf16[2,4,256,192] v=bf16[2,4,256,128] causal training",
           "q=bf16[1,2,256,256] causal training", "q=bf16[2,4,128,64] k=bf16[2,4,384,64] training",
           "q=bf16[2,4,128,64] k=bf16[2,4,384,64] causal training", "q=bf16[2,4,384,64] k=bf16[2,4,128,64] causal training",
           "q=bf16[2,4,128,64] k=bf16[2,4,384,64] causal lower_right training",
           "q=bf16[2,4,256,64]{stride=65536,64,256,1} training",
           "q=bf16[2,4,256,64]{stride=196608,64,768,1} causal training",
           "q=bf16[2,4,1,64] k=bf16[2,4,256,64]",
           "q=bf16[2,8,1,128] k=bf16[2,2,300,128]", "q=bf16[2,4,512,64] window=100:0 training",
           "q=bf16[2,4,512,64] window=64:32 training", "q=bf16[2,4,256,64] window=0:0 training",
           "q=bf16[2,4,256,64] window=40:0 causal training"})
    expect_right(line);
}

TEST(GpuNumbers, OddLengths) {
  for (const char* line :
       {"q=bf16[2,3,197,64] training", "q=bf16[2,3,704,64] training", "q=bf16[2,3,704,64] causal training",
        "q=bf16[1,2,1,64] k=bf16[1,2,128,64] training", "q=bf16[1,2,2,8] training", "q=bf16[1,2,63,72] training",
        "q=bf16[1,2,65,64] k=bf16[1,2,129,64] training", "q=bf16[1,2,5,8] k=bf16[1,2,2,8] causal training",
        "q=bf16[1,1,2,8] k=bf16[1,1,5,8] causal training", "q=bf16[1,24,261,64] training grad_strides=400896,64,1536,1"})
    expect_right(line);
}

// Rows of very negative logits: what an unclosed tail turns into NaN.
TEST(GpuNumbers, VeryNegativeLogits) {
  Data data;
  data.shift = -120;
  data.query_scale = data.key_scale = 0.1;
  data.closed = 0;
  for (const char* line :
       {"q=bf16[1,1,704,64] mask=bool[1,1,704,704] training", "q=bf16[1,1,704,64] mask=bf16[1,1,704,704] training",
        "q=bf16[1,1,704,64] training", "q=bf16[1,1,704,64] causal training",
        "q=bf16[1,2,1,64] k=bf16[1,2,128,64] training", "q=bf16[1,1,2,8] training",
        "q=bf16[1,2,197,64] training", "q=bf16[1,2,640,64] mask=bool[1,1,640,640] training"})
    expect_right(line, data);
}

TEST(GpuNumbers, Masks) {
  for (const char* line :
       {"q=bf16[2,4,256,64] mask=bool[2,1,256,256] training", "q=bf16[2,4,256,64] mask=bool[1,1,256,256] training",
        "q=bf16[2,4,256,64] mask=bool[2,4,256,256] training", "q=bf16[2,4,256,64] mask=bool[2,1,1,256] training",
        "q=bf16[2,4,256,64] mask=bf16[2,1,256,256] training", "q=bf16[2,4,256,64] mask=f32[1,1,256,256] training",
        "q=bf16[2,3,197,64] mask=bool[2,1,197,197] training", "q=bf16[2,3,197,64] mask=bf16[1,3,197,197] training",
        "q=bf16[2,3,66,64] mask=bf16[1,1,66,66] training", "q=bf16[1,2,64,64] mask=bf16[1,1,64,64]{stride=4224,4224,66,1} training",
        "q=bf16[1,2,64,64] mask=bf16[1,1,64,64]{stride=8192,8192,128,2} training",
        "q=bf16[1,2,64,64] mask=bool[1,1,64,1] training", "q=f16[2,4,256,64] mask=bool[2,1,256,256] training",
        "q=bf16[2,4,256,64] mask=bool[2,1,256,256]", "q=bf16[2,4,1,64] k=bf16[2,4,256,64] mask=bool[2,1,1,256]",
        "q=bf16[1,2,6,8] k=bf16[1,2,10,8] mask=bool[1,1,6,10] training"})
    expect_right(line);
}

TEST(GpuNumbers, RowsWithNoOpenKey) {
  for (const char* line :
       {"q=bf16[2,4,256,64] mask=bool[2,1,256,256] training", "q=bf16[2,4,256,64] mask=bf16[1,1,256,256] training",
        "q=bf16[2,4,256,64] mask=f32[1,1,256,256] training", "q=bf16[2,3,197,64] mask=bool[1,1,197,197] training",
        "q=bf16[1,8,10,64] mask=bool[1,1,10,10]", "q=bf16[4,4,128,64] mask=bool[4,1,1,128] training",
        "q=bf16[4,4,256,64] lengths training", "q=bf16[4,4,256,64] lengths causal training"})
    for (const bool all : {false, true}) {
      Data data;
      data.closed_rows = 3;
      data.all_closed = all;
      expect_right(line, data);
    }
}

TEST(GpuNumbers, BiasGradients) {
  for (const char* line :
       {"q=bf16[2,4,256,64] mask=bf16[1,4,256,256]! training", "q=bf16[2,4,256,64] mask=bf16[2,4,256,256]! training",
        "q=bf16[2,4,256,64] mask=bf16[1,1,256,256]! training", "q=bf16[2,4,256,64] mask=bf16[2,1,256,256]! training",
        "q=bf16[2,4,256,64] mask=bf16[1,4,1,256]! training", "q=bf16[2,4,256,64] mask=bf16[1,1,1,256]! training",
        "q=bf16[2,4,197,64] mask=bf16[1,4,197,197]! training", "q=bf16[2,4,200,64] mask=bf16[1,4,200,200]! training",
        "q=f16[2,4,256,64] mask=f16[1,4,256,256]! training",
        "q=bf16[2,4,128,64] k=bf16[2,4,384,64] mask=bf16[1,4,128,384]! training",
        "q=bf16[16,4,128,48] mask=bf16[16,4,128,128]! training"})
    expect_right(line);
}

TEST(GpuNumbers, LayoutsOfGradients) {
  Data ones;
  ones.grad_is_ones = true;
  expect_right("q=bf16[2,4,256,64] training grad_strides=0,0,0,0", ones);
  expect_right("q=bf16[2,4,256,64] training grad_strides=0,0,0,1");
  expect_right("q=bf16[2,4,256,64] training grad_strides=65536,64,256,1");
  expect_right("q=bf16[2,4,256,64] training grad_strides=65536,1,4,1024");
  expect_right("q=bf16[1,16,33,64] k=bf16[1,16,33,64]{stride=2112,0,64,1} mask=bool[1,1,33,33] training");
  expect_right("q=bf16[2,1,64,64]{stride=4096,7,64,1} training");
}

TEST(GpuNumbers, F32Inference) {
  expect_right("q=f32[2,4,256,64]", {}, true);
  expect_right("q=f32[2,4,256,64] causal", {}, true);
}

TEST(GpuNumbers, LengthsAndHeadDims) {
  for (const char* line : {"q=bf16[4,4,256,64] lengths training", "q=bf16[4,4,256,64] lengths causal training",
                           "q=bf16[4,4,197,64] lengths training", "q=bf16[2,4,256,96] training",
                           "q=bf16[2,4,256,8] training", "q=bf16[2,4,256,72] training", "q=bf16[2,4,256,160] training"})
    expect_right(line);
}

// The mask of dropout is read off by a value matrix of ones on the diagonal; the same seed must give the same mask in
// both directions and for other data.
TEST(GpuDropout, SameSeedSameMaskInBothDirections) {
  const Case c = parse_case("x q=bf16[2,4,128,64] dropout=0.25 training");
  AttentionRun run(context(), c.call, c.layouts);
  ASSERT_TRUE(run.claimed()) << run.refusal();
  run.draw(data_of(5));
  const auto first = run.run_again();
  EXPECT_EQ(first, run.run_again()) << "the same seed";
  run.draw(data_of(6));
  EXPECT_NE(first, run.run_again());
}

TEST(GpuDeterminism, TheFlagGivesTheSameBits) {
  const Case c = parse_case("x q=bf16[4,16,1024,64] causal training deterministic");
  AttentionRun run(context(), c.call, c.layouts);
  ASSERT_TRUE(run.claimed()) << run.refusal();
  EXPECT_TRUE(run.plan().deterministic);
  run.draw(data_of(1));
  const auto first = run.run_again();
  for (int i = 0; i < 5; ++i) EXPECT_EQ(first, run.run_again());
}

std::string temporary_folder() {
  char name[] = "/tmp/fulmen_store_XXXXXX";
  return mkdtemp(name);
}

TEST(GpuStore, ASecondContextLoadsWhatTheFirstBuilt) {
  Options opts = options();
  opts.plan_store = true;
  opts.cache_folder = temporary_folder();
  std::vector<std::string> warnings;
  opts.warn = [&](const std::string& message) { warnings.push_back(message); };
  const Case c = parse_case("x q=bf16[2,4,256,64] causal training");
  {
    const Context first(opts);
    AttentionRun run(first, c.call, c.layouts);
    EXPECT_EQ(run.compare(data_of(1)).trouble, "");
    EXPECT_EQ(first.cache_info().builds_forward, 1);
    EXPECT_EQ(first.cache_info().builds_backward, 1);
    EXPECT_EQ(first.cache_info().store_writes, 2);
  }
  {
    const Context second(opts);
    const auto begin = std::chrono::steady_clock::now();
    AttentionRun run(second, c.call, c.layouts);
    const double ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
    std::printf("  claim from the store: %.1f ms\n", ms);
    EXPECT_EQ(run.compare(data_of(1)).trouble, "");
    EXPECT_EQ(second.cache_info().loads_from_store, 2);
    EXPECT_EQ(second.cache_info().builds_forward + second.cache_info().builds_backward, 0);
    EXPECT_EQ(second.cache_info().proofs, 0);
  }
  for (const auto& file : std::filesystem::directory_iterator(opts.cache_folder + "/cudnn_plans")) {
    std::fstream damaged(file.path(), std::ios::in | std::ios::out | std::ios::binary);
    damaged.seekp(static_cast<std::streamoff>(file.file_size() / 2));
    damaged.write("damage", 6);
  }
  EXPECT_TRUE(warnings.empty());
  {
    const Context third(opts);
    AttentionRun run(third, c.call, c.layouts);
    EXPECT_EQ(run.compare(data_of(1)).trouble, "");
    EXPECT_EQ(third.cache_info().store_damaged, 2);
    EXPECT_EQ(third.cache_info().builds_forward, 1);
    EXPECT_EQ(warnings.size(), 1u) << "one warning";
  }
  std::filesystem::remove_all(opts.cache_folder);
}

TEST(GpuFaults, TheNextPlanRuns) {
  const Case c = parse_case("x q=bf16[2,4,256,64] causal training");
  for (const char* fault : {"build:1", "forward:1", "backward:1"}) {
    Options opts = options();
    opts.fault = fault;
    const Context faulty(opts);
    AttentionRun run(faulty, c.call, c.layouts);
    ASSERT_TRUE(run.claimed()) << fault << ": " << run.refusal();
    EXPECT_EQ(run.compare(data_of(1)).trouble, "") << fault;
    EXPECT_EQ(faulty.cache_info().plan_failures, 1) << fault;
  }
}

TEST(GpuFaults, WhenNoPlanIsLeftItIsSaid) {
  const Case c = parse_case("x q=bf16[2,4,256,64] causal training");
  Options opts = options();
  opts.fault = "build";
  const Context builds_nothing(opts);
  AttentionRun refused(builds_nothing, c.call, c.layouts);
  EXPECT_FALSE(refused.claimed());
  EXPECT_NE(refused.refusal().find("builds no plan"), std::string::npos) << refused.refusal();
  opts.fault = "backward";
  const Context fails(opts);
  AttentionRun run(fails, c.call, c.layouts);
  ASSERT_TRUE(run.claimed());
  run.draw(data_of(1));
  EXPECT_NO_THROW(run.enqueue(true, false));
  EXPECT_THROW(run.enqueue(false, true), DeviceError);
}

TEST(GpuCapture, AWarmCallIsReplayedWithNewData) {
  const cuda::Driver& driver = cuda::Driver::require();
  for (const char* line : {"q=bf16[2,4,256,64] causal training", "q=bf16[2,4,256,64] mask=bool[2,1,256,256] training",
                           "q=bf16[2,4,197,64] training", "q=bf16[2,4,256,64] dropout=0.2 training"}) {
    const Case c = parse_case(std::string("x ") + line);
    AttentionRun run(context(), c.call, c.layouts);
    ASSERT_TRUE(run.claimed());
    run.draw(data_of(1));
    run.run_again();  // warm
    driver.begin_capture(0, run.stream());
    run.enqueue();
    void* graph = driver.end_capture(0, run.stream());
    run.draw(data_of(2));
    const auto eager = run.run_again();
    run.draw(data_of(2));  // clears the results
    driver.run_graph(0, graph, run.stream());
    EXPECT_EQ(eager, run.run_again(false)) << line;  // runs once more over the same memory
    run.draw(data_of(2));
    driver.run_graph(0, graph, run.stream());
    driver.synchronize(0, run.stream());
    EXPECT_EQ(run.compare(data_of(2)).refused, "");
  }
}

TEST(GpuCapture, AColdCallIsAnErrorThatLeavesTheCaptureWhole) {
  const cuda::Driver& driver = cuda::Driver::require();
  const Context cold(options());
  const Case warm = parse_case("x q=bf16[2,4,256,64] training"), c = parse_case("x q=bf16[2,4,264,64] training");
  AttentionRun run(cold, warm.call, warm.layouts);
  run.draw(data_of(1));
  run.run_again();
  driver.begin_capture(0, run.stream());
  run.enqueue();
  EXPECT_THROW(cold.claim_sdpa(c.call, driver.target(0), c.layouts, run.stream()), DeviceError);
  void* graph = nullptr;
  EXPECT_NO_THROW(graph = driver.end_capture(0, run.stream()));
  EXPECT_NO_THROW(driver.run_graph(0, graph, run.stream()));
  EXPECT_TRUE(is_claimed(*cold.claim_sdpa(c.call, driver.target(0), c.layouts, run.stream())));
}

TEST(GpuThreads, EachHasItsHandleAndAllAreRight) {
  const Context shared(options());
  std::vector<std::string> troubles(8);
  std::vector<std::thread> threads;
  for (size_t t = 0; t < troubles.size(); ++t)
    threads.emplace_back([&, t] {
      try {
        for (int i = 0; i < 6; ++i) {
          const Case c = parse_case(i % 2 ? "x q=bf16[2,4,256,64] causal training"
                                          : "x q=bf16[1,2," + std::to_string(64 + 8 * t) + ",64] training");
          AttentionRun run(shared, c.call, c.layouts);
          troubles[t] += run.compare(data_of(t * 10 + static_cast<size_t>(i))).trouble;
        }
      } catch (const std::exception& error) {
        troubles[t] += error.what();
      }
    });
  for (std::thread& thread : threads) thread.join();
  for (const std::string& trouble : troubles) EXPECT_EQ(trouble, "");
  EXPECT_LE(shared.cache_info().builds_forward, 9);
}

TEST(GpuCache, NoBuildAfterTheFirstCall) {
  const Context fresh(options());
  const Case c = parse_case("x q=bf16[2,4,256,64] causal training");
  for (int i = 0; i < 100; ++i) {
    AttentionRun run(fresh, c.call, c.layouts);
    run.draw(data_of(1));
    run.enqueue();
  }
  EXPECT_EQ(fresh.cache_info().builds_forward, 1);
  EXPECT_EQ(fresh.cache_info().builds_backward, 1);
}

// Ever new lengths of one kind of call: few plans, right numbers, and a claim that doesn't wait for a build.
TEST(GpuLengths, ManyLengthsSharePlans) {
  for (const char* options_text : {"training", "causal training", "dropout=0.2", "causal"}) {
    const bool dropout = std::string(options_text).find("dropout") != std::string::npos;
    const Context fresh(options());
    double longest = 0;
    std::mt19937_64 random(1);
    std::vector<int> lengths;
    for (int i = 1; i <= 512; i += 7) lengths.push_back(i);
    std::shuffle(lengths.begin(), lengths.end(), random);
    int number = 0;
    for (const int length : lengths) {
      const std::string size = "[2,4," + std::to_string(length) + ",64]";
      const std::string strides = number % 2 ? "" : "{stride=" + std::to_string(length * 256) + ",64,256,1}";
      const Case c = parse_case("x q=bf16" + size + strides + " k=bf16" + size + " v=bf16" + size + " " + options_text);
      const auto begin = std::chrono::steady_clock::now();
      AttentionRun run(fresh, c.call, c.layouts);
      const double ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
      if (++number > 10) longest = std::max(longest, ms);
      if (!run.claimed()) continue;  // length 1 has no backward
      if (!dropout) {
        EXPECT_EQ(run.compare(data_of(static_cast<uint64_t>(length))).trouble, "") << options_text << " length " << length;
      } else {
        run.draw(data_of(1));
        EXPECT_EQ(run.run_again(), run.run_again());
      }
    }
    const cudnn::CacheInfo info = fresh.cache_info();
    EXPECT_LE(info.builds_forward, 10) << options_text;
    EXPECT_LE(info.builds_backward, 10) << options_text;
    EXPECT_GT(info.shared, 50) << options_text;
    std::printf("  %s: %zu lengths, %lld + %lld builds, %lld shared, longest claim after the 10th %.1f ms\n", options_text, lengths.size(),
                static_cast<long long>(info.builds_forward), static_cast<long long>(info.builds_backward),
                static_cast<long long>(info.shared), longest);
  }
}

TEST(GpuLengths, CrossAndGroupedCallsShareToo) {
  Options opts = options();
  opts.exact_lengths = 0;
  const Context fresh(opts);
  for (const char* line : {"q=bf16[2,8,100,64] k=bf16[2,2,333,64] training", "q=f16[1,4,700,128] causal training",
                           "q=bf16[2,4,1,64] k=bf16[2,4,77,64]", "q=bf16[2,4,300,64] k=bf16[2,4,100,64] causal training",
                           "q=bf16[1,2,130,192] v=bf16[1,2,130,128] causal training", "q=bf16[2,4,96,64] training grad_strides=0,0,0,0",
                           "q=bf16[2,4,96,64] training deterministic"}) {
    const Case c = parse_case(std::string("x ") + line);
    AttentionRun run(fresh, c.call, c.layouts);
    ASSERT_TRUE(run.claimed()) << line << run.refusal();
    for (const double shift : {0.0, -120.0}) {
      Data data = data_of(3);
      data.shift = shift;
      if (shift != 0) data.query_scale = data.key_scale = 0.1;
      EXPECT_EQ(run.compare(data).trouble, "") << line << " shift " << shift;
    }
  }
  EXPECT_EQ(fresh.cache_info().shared, 7);
}

// Times of a shared plan beside the exact one.
TEST(GpuTimes, SharedPlans) {
  Options opts = options();
  opts.exact_lengths = 0;
  const Context sharing(opts);
  for (const char* line : {"q=bf16[2,32,3840,128]{stride=15728640,128,4096,1} causal training", "q=bf16[8,12,900,64]{stride=691200,64,768,1} causal training",
                           "q=bf16[16,12,200,64]{stride=153600,64,768,1} training"}) {
    const Case c = parse_case(std::string("x ") + line);
    AttentionRun exact(context(), c.call, c.layouts), shared(sharing, c.call, c.layouts);
    const auto a = exact.time(20), b = shared.time(20);
    std::printf("  time %-70s exact %.3f + %.3f ms, shared %.3f + %.3f ms\n", line, a.forward, a.backward, b.forward, b.backward);
  }
}

std::string verdict(const Claim& claim) {
  return is_claimed(claim) ? "claimed" : std::to_string(static_cast<int>(std::get<Refusal>(claim).code));
}

// Same question, once with a handle and once with this GPU's own description.
bool expect_same_verdict(const SdpaCall& call, const cudnn::SdpaLayouts& layouts, const std::string& what) {
  const Target at_hand = cuda::Driver::require().target(0);
  const Target described = parse_target(at_hand.description, "described");
  const auto one = context().claim_sdpa(call, at_hand, layouts), two = context().claim_sdpa(call, described, layouts);
  EXPECT_EQ(verdict(*one), verdict(*two)) << what << "\n at hand: "
                                          << (is_claimed(*one) ? "" : std::get<Refusal>(*one).reason) << "\n described: "
                                          << (is_claimed(*two) ? "" : std::get<Refusal>(*two).reason);
  return verdict(*one) == verdict(*two);
}

// The program may run on another machine than the one that built it: then from the root of a source tree there.
std::string cases_path() {
  const std::string here = "tests/golden/cudnn_cases.txt";
  return std::filesystem::exists(here) ? here : std::string(FULMEN_SOURCE_DIR) + "/" + here;
}

TEST(GpuAgreement, TheDescribedVerdictIsTheRealOne) {
  int64_t asked = 0, agreed = 0;
  for (const Case& c : cudnn::read_cases(cases_path())) {
    ++asked;
    agreed += expect_same_verdict(c.call, c.layouts, c.id);
  }
  std::printf("  verdicts: %lld public cases asked of the handle and of the description, %lld agree\n",
              static_cast<long long>(asked), static_cast<long long>(agreed));
}

struct Drawn {
  SdpaCall call;
  cudnn::SdpaLayouts layouts;
  std::string text;
};

Drawn draw_call(std::mt19937_64& random) {
  const auto pick = [&](std::initializer_list<int64_t> values) { return *(values.begin() + random() % values.size()); };
  Drawn d;
  const DType dtype = random() % 4 ? DType::bf16 : DType::f16;
  const int64_t key_heads = pick({1, 2, 3}), heads = key_heads * pick({1, 1, 2, 4}), batch = pick({1, 2, 3});
  const int64_t dim = pick({8, 16, 32, 40, 64, 64, 64, 72, 96, 128, 128, 192, 256});
  const int64_t value_dim = random() % 6 ? dim : pick({8, 64, 128});
  const auto length = [&] { return random() % 2 ? pick({1, 2, 64, 128, 192, 256}) : static_cast<int64_t>(1 + random() % 300); };
  const int64_t queries = length(), keys = random() % 2 ? queries : length();
  const auto tensor = [&](int64_t h, int64_t s, int64_t size) {
    TensorType type = contiguous_type(dtype, {batch, h, s, size}, {DeviceKind::cuda, 0});
    switch (random() % 5) {
      case 0: type.strides = {s * h * size, size, h * size, 1}; break;              // (batch, length, heads, dim)
      case 1: type.strides = {3 * s * h * size, size, 3 * h * size, 1}; break;      // a slice of a packed projection
      case 2: type.strides = {h * (s + 3) * (size + 8), (s + 3) * (size + 8), size + 8, 1}; break;  // gaps everywhere
      case 3:
        if (h > 1 && random() % 3 == 0) type.strides = {s * size, 0, size, 1};  // one head, expanded
        break;
      default: break;
    }
    type.requires_grad = random() % 8 != 0;
    return type;
  };
  d.call.query = tensor(heads, queries, dim);
  for (size_t i = 0; i < 4; ++i)
    if (d.call.query.strides[i] == 0) d.call.query.strides = contiguous_strides(d.call.query.shape);
  d.call.key = tensor(key_heads, keys, dim);
  d.call.value = tensor(key_heads, keys, value_dim);
  d.call.scale = random() % 4 ? 1.0 / std::sqrt(static_cast<double>(dim)) : pick({-1, 0, 1}) * 0.25;
  d.call.training = random() % 5 != 0;
  switch (random() % 8) {
    case 0:
    case 1: d.call.is_causal = true; break;
    case 2:
      if (queries <= keys) d.call.is_causal = d.call.lower_right = true;
      break;
    case 3:
      if (queries <= keys) d.call.window_left = pick({0, 1, 16, 100}), d.call.window_right = pick({0, 5, 64});
      break;
    case 4:
      d.call.key_lengths = contiguous_type(DType::i32, {batch}, {DeviceKind::cuda, 0});
      d.call.is_causal = random() % 2;
      break;
    case 5:
    case 6: {
      d.call.mask = contiguous_type(random() % 2 ? DType::boolean : random() % 3 ? dtype : DType::f32,
                                    {pick({1, batch}), pick({1, heads}), random() % 4 ? queries : 1, random() % 8 ? keys : 1},
                                    {DeviceKind::cuda, 0});
      if (random() % 4 == 0) {  // a slice of a wider mask
        const Dims& s = d.call.mask->shape;
        d.call.mask->strides = {s[1] * s[2] * (s[3] + 5), s[2] * (s[3] + 5), s[3] + 5, 1};
      }
      d.call.mask->requires_grad = d.call.mask->dtype == dtype && random() % 2;
      break;
    }
    default: break;
  }
  d.call.deterministic = d.call.training && random() % 6 == 0;
  if (d.call.training && random() % 4 == 0)
    d.layouts.out_grad = random() % 2 ? Dims{0, 0, 0, 0} : Dims{queries * heads * value_dim, value_dim, heads * value_dim, 1};
  d.text = to_string(d.call.query) + " " + to_string(d.call.key) + " " + to_string(d.call.value) +
           (d.call.mask ? " mask=" + to_string(*d.call.mask) : "") + (d.call.is_causal ? " causal" : "") +
           (d.call.lower_right ? " lower_right" : "") + (d.call.key_lengths ? " lengths" : "") +
           (d.call.window_left >= 0 ? " window=" + std::to_string(d.call.window_left) + ":" + std::to_string(d.call.window_right) : "") +
           (d.call.training ? " training" : "") + (d.call.deterministic ? " deterministic" : "") + " scale=" +
           std::to_string(d.call.scale) + (d.layouts.out_grad ? " grad_strides=" + to_string(*d.layouts.out_grad) : "");
  return d;
}

TEST(GpuFuzz, RandomCallsAreRightOrRefused) {
  const char* calls_text = std::getenv("FULMEN_FUZZ_CALLS");
  const char* seconds_text = std::getenv("FULMEN_FUZZ_SECONDS");
  const char* seed_text = std::getenv("FULMEN_FUZZ_SEED");
  const int64_t calls = calls_text ? std::atoll(calls_text) : 1000;
  const double seconds = seconds_text ? std::atof(seconds_text) : 120;
  const uint64_t first_seed = seed_text ? std::strtoull(seed_text, nullptr, 10) : 1;
  const auto begin = std::chrono::steady_clock::now();
  const auto elapsed = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count(); };
  int64_t done = 0, shapes = 0, refused = 0, wrong = 0, agreed = 0;
  std::map<std::string, int64_t> refusals;
  std::map<std::string, std::pair<int64_t, std::string>> wrong_calls;  // by call: how many draws, and the first trouble
  for (uint64_t seed = first_seed; done < calls && elapsed() < seconds; ++seed) {
    std::mt19937_64 random(seed);
    const Drawn d = draw_call(random);
    ++shapes;
    agreed += expect_same_verdict(d.call, d.layouts, "FULMEN_FUZZ_SEED=" + std::to_string(seed) + " " + d.text);
    // A quarter runs on padded plans, as calls of many lengths do.
    AttentionRun run(seed % 4 == 0 ? sharing_context() : context(), d.call, d.layouts);
    if (!run.claimed()) {
      ++refused, ++done;
      ++refusals[run.refusal().substr(0, 60)];
      continue;
    }
    for (int repeat = 0; repeat < 20 && done < calls && elapsed() < seconds; ++repeat) {
      Data data;
      data.seed = seed * 1000 + static_cast<uint64_t>(repeat);
      data.closed = (random() % 4) * 0.3;
      data.closed_rows = static_cast<int>(random() % 3);
      data.all_closed = random() % 20 == 0;
      if (random() % 5 == 0) data.shift = -120, data.query_scale = data.key_scale = 0.1;
      if (random() % 5 == 0) data.query_scale = 4;
      if (random() % 7 == 0) data.grad_scale = 1e-3;
      const Outcome outcome = run.compare(data);
      ++done;
      if (outcome.trouble.empty()) continue;
      auto& [count, first] = wrong_calls["FULMEN_FUZZ_SEED=" + std::to_string(seed) + " " + d.text];
      if (count++ == 0) first = outcome.trouble;
      if (++wrong <= 10)
        ADD_FAILURE() << "FULMEN_FUZZ_SEED=" << seed << " repeat " << repeat << " " << d.text << " closed "
                      << data.closed << " rows " << data.closed_rows << " all " << data.all_closed << " shift "
                      << data.shift << " scales " << data.query_scale << "/" << data.grad_scale << "\n  "
                      << outcome.trouble;
    }
  }
  std::printf("  fuzz: %lld calls of %lld shapes in %.0f s, %lld refused, %lld wrong\n", static_cast<long long>(done),
              static_cast<long long>(shapes), elapsed(), static_cast<long long>(refused), static_cast<long long>(wrong));
  std::printf("  verdicts: %lld random calls asked of the handle and of the description, %lld agree\n",
              static_cast<long long>(shapes), static_cast<long long>(agreed));
  for (const auto& [reason, count] : refusals) std::printf("    %lld x %s\n", static_cast<long long>(count), reason.c_str());
  for (const auto& [call, found] : wrong_calls)
    std::printf("    wrong in %lld draws: %s\n      %s\n", static_cast<long long>(found.first), call.c_str(), found.second.c_str());
  EXPECT_EQ(wrong, 0);
}

// Times of the rows that docs/attention.md reports; $FULMEN_GPU_RESULTS gets them as JSON.
TEST(GpuTimes, Rows) {
  const std::pair<const char*, const char*> rows[] = {
      {"Llama-2-7B b2 h32 s4096 d128 causal", "q=bf16[2,32,4096,128]{stride=16777216,128,4096,1} causal training"},
      {"Llama-2-7B b16 h32 s4096 d128 causal", "q=bf16[16,32,4096,128]{stride=16777216,128,4096,1} causal training"},
      {"GQA 64/8 b1 s8192 d128 causal",
       "q=bf16[1,64,8192,128]{stride=67108864,128,8192,1} k=bf16[1,8,8192,128]{stride=8388608,128,1024,1} causal training"},
      {"GQA 64/8 b1 s16384 full",
       "q=bf16[1,64,16384,128]{stride=134217728,128,8192,1} k=bf16[1,8,16384,128]{stride=16777216,128,1024,1} training"},
      {"GPT-2 b8 h12 s1024 d64 causal", "q=bf16[8,12,1024,64]{stride=786432,64,768,1} causal training"},
      {"GPT-2 dropout 0.1", "q=bf16[8,12,1024,64]{stride=786432,64,768,1} causal dropout=0.1 training"},
      {"b1 h128 s4096 d192/128 causal", "q=bf16[1,128,4096,192] v=bf16[1,128,4096,128] causal training"},
      {"b2 h16 s4096 d256 causal", "q=bf16[2,16,4096,256] causal training"},
      {"T5 learned bias b4 h16 s2048 d64", "q=bf16[4,16,2048,64] mask=bf16[1,16,2048,2048]! training"},
      {"fixed bias b2 h32 s2048 d128", "q=bf16[2,32,2048,128] mask=bf16[1,1,2048,2048] training"},
      {"bool mask b8 h16 s2048 d64", "q=bf16[8,16,2048,64] mask=bool[8,1,2048,2048] training"},
      {"ViT b64 h12 s197 d64", "q=bf16[64,12,197,64]{stride=151296,64,768,1} training"},
      {"cross 128 x 4096 b8 h16 d64", "q=bf16[8,16,128,64] k=bf16[8,16,4096,64] training"},
  };
  std::string json = "{\"rows\": [";
  for (const auto& [name, line] : rows) {
    const Case c = parse_case(std::string("x ") + line);
    const auto begin = std::chrono::steady_clock::now();
    AttentionRun run(context(), c.call, c.layouts);
    const double claim_ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
    if (!run.claimed()) {
      std::printf("  %-40s %s\n", name, run.refusal().c_str());
      continue;
    }
    const auto t = run.time(30);
    std::printf("  %-40s forward %8.3f ms  backward %8.3f ms  both %8.3f ms  first claim %6.0f ms  %s | %s\n", name,
                t.forward, t.backward, t.both, claim_ms, run.plan().forward.kernel.c_str(),
                run.plan().backward ? run.plan().backward->kernel.c_str() : "");
    char text[512];
    std::snprintf(text, sizeof text,
                  "%s\n  {\"name\": \"%s\", \"forward_ms\": %.4f, \"backward_ms\": %.4f, \"both_ms\": %.4f, "
                  "\"first_claim_ms\": %.1f}",
                  json.back() == '[' ? "" : ",", name, t.forward, t.backward, t.both, claim_ms);
    json += text;
  }
  json += "\n], \"cudnn\": \"" + context().version() + "\", \"device\": \"" + cuda::Driver::require().device(0).name + "\"}\n";
  if (const char* path = std::getenv("FULMEN_GPU_RESULTS")) std::ofstream(path) << json;
}

}  // namespace
}  // namespace fulmen::gpu_tests
