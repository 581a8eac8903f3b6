// Random attention calls as users make them (attention_call.h), compiled and run forward and backward like any program,
// against the definition in float64 with an error bound for each element (attention_exact.cpp). Watched besides: bytes
// beside every buffer and around the arena, operands that change, and that the CPU executor claims what it can, so that
// nothing falls to the decomposition in silence. A failing draw shrinks and prints one line that runs it again:
//   FULMEN_ATTENTION_CALL='...' fulmen_tests --gtest_filter='AttentionCalls*'
// FULMEN_FUZZ_SEED, FULMEN_FUZZ_COUNT: which draws; FULMEN_FUZZ_VALUES: how often each is run by the kernels, with other values;
// FULMEN_FUZZ_SECONDS ends it early; FULMEN_FUZZ_LOG: a file that gets a line now and then.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <fstream>

#include "core/error.h"
#include "core/parallel.h"
#include "driver/compile.h"
#include "executors/default_list.h"
#include "executors/reference/reference.h"
#include "ops/builder.h"
#include "ops/reference_loops.h"
#include "tests/fuzz/attention_call.h"
#include "tests/table/strided_memory.h"

namespace fulmen::fuzz {
namespace {

using table::StridedMemory;

uint64_t number_from(const char* name, uint64_t fallback) {
  const char* text = std::getenv(name);
  return text ? std::strtoull(text, nullptr, 10) : fallback;
}

// Claims nothing of attention, and what its executor claims otherwise.
class WithoutAttention final : public Executor {
 public:
  explicit WithoutAttention(std::shared_ptr<const Executor> executor) : executor_(std::move(executor)) {}
  std::string_view name() const override { return executor_->name(); }
  std::string_view doc() const override { return executor_->doc(); }
  std::string unavailable_reason() const override { return executor_->unavailable_reason(); }
  Claim claim(const Call& call, const Target& target) const override {
    if (call.op->name.starts_with("sdpa")) return Refusal{RefusalCode::not_implemented, call.op->name + ": attention is left out"};
    return executor_->claim(call, target);
  }
  bool can_fuse(const Call& call, const Target& target) const override { return executor_->can_fuse(call, target); }
  std::unique_ptr<Kernel> make_kernel(const Call& call, const Plan& plan, const Target& target) const override {
    return executor_->make_kernel(call, plan, target);
  }

 private:
  std::shared_ptr<const Executor> executor_;
};

struct Lists {
  ExecutorList kernels = default_executors(), decomposition, reference{reference::make_reference_executor()};
  Lists() {
    for (const auto& executor : kernels) decomposition.push_back(std::make_shared<WithoutAttention>(executor));
  }
  const ExecutorList& of(Runner runner) const {
    return runner == Runner::kernels ? kernels : runner == Runner::decomposition ? decomposition : reference;
  }
};

const Lists& lists() {
  static const Lists all;
  return all;
}

struct Compiled {
  std::shared_ptr<const CompiledTrace> compiled;
  TensorType out;
  std::optional<TensorType> lse;
};

Compiled compile_call(const AttentionCall& call) {
  cpu::force_isa(call.isa);
  set_thread_count(call.threads);
  Trace trace;
  std::vector<ValueId> ids;
  bool training = false;
  for (size_t i = 0; i < sdpa_operand_count; ++i) {
    ids.push_back(call.types[i] ? trace.add_input(*call.types[i]) : no_value);
    training |= call.types[i] && call.types[i]->requires_grad;
  }
  Builder builder(trace);
  const auto results = builder.emit("sdpa", ids, call.attrs);
  trace.outputs = results;
  Compiled result;
  result.out = trace.type(results[0]);
  if (results.size() > 1) result.lse = trace.type(results[1]);
  CompileOptions options;
  options.executors = lists().of(call.runner);
  options.training = training;
  options.free_layouts = options.share_outputs = call.values % 2 == 0;
  result.compiled = compile(trace, options);
  return result;
}

// Why the CPU executor may leave this call to its decomposition; empty if it may not.
std::string allowed_refusal(const AttentionCall& call) {
  if (call.query().dtype == DType::f64) return "f64";
  const auto& mask = call.types[sdpa_mask];
  if (mask && mask->dtype == DType::f64) return "f64 mask";
  return {};
}

std::string check_claims(const AttentionCall& call, const CompiledTrace& compiled) {
  if (call.runner != Runner::kernels || !allowed_refusal(call).empty()) return {};
  for (const ClaimRecord& record : compiled.claims)
    if (record.op == "sdpa" || record.op == "sdpa_forward" || record.op == "sdpa_backward")
      if (record.executor == "cpu") return {};
  std::string text = "the cpu executor doesn't claim this call";
  for (const ClaimRecord& record : compiled.claims)
    for (const auto& [executor, refusal] : record.refusals)
      if (executor == "cpu" && record.op.starts_with("sdpa")) text += "; " + refusal.reason;
  return text;
}

void run_program(const Program& program, const std::vector<const void*>& inputs, std::vector<StridedMemory>& outputs, std::string& failure) {
  constexpr size_t margin = 64;
  std::vector<unsigned char> memory(program.arena_bytes() + 3 * margin, 0xA5);
  unsigned char* arena = memory.data() + margin + (margin - reinterpret_cast<uintptr_t>(memory.data()) % margin) % margin;
  std::vector<void*> pointers;
  for (StridedMemory& output : outputs) pointers.push_back(output.data());
  program.run({}, inputs.data(), pointers.data(), arena);
  const auto untouched = [&](const unsigned char* from, const unsigned char* to) { return std::all_of(from, to, [](unsigned char byte) { return byte == 0xA5; }); };
  if (!untouched(memory.data(), arena) || !untouched(arena + program.arena_bytes(), memory.data() + memory.size())) failure = "a byte beside the arena changed";
  for (StridedMemory& output : outputs)
    if (!output.canaries_intact()) failure = "a byte beside a result changed";
}

void compare(const Bounded& exact, const HostTensor& found, const std::string& what, std::string& failure) {
  if (!failure.empty()) return;
  const double largest = found.type.dtype == DType::f16 ? 65504.0 : found.type.dtype == DType::f64 ? 1e300 : 3.38e38;
  for (size_t k = 0; k < exact.value.size(); ++k) {
    const double right = exact.value[k], got = found.f[k];
    if (right == got || std::abs(got - right) <= exact.bound[k] || std::isinf(exact.bound[k])) continue;
    if (std::isfinite(right) && std::abs(right) + exact.bound[k] > largest) continue;  // no such number in this dtype
    failure = what + ", element " + std::to_string(k) + ": " + std::to_string(got) + ", right is " + std::to_string(right) + " within " + to_string(AttrValue(exact.bound[k]));
    return;
  }
}

// Empty if all is right.
std::string run_call(const AttentionCall& call, const Compiled& program) {
  const CompiledTrace& compiled = *program.compiled;
  const AttentionValues values = operand_values(call, program.out, program.lse ? &*program.lse : nullptr);
  const ExactAttention exact = exact_attention(call, values);
  std::string failure;
  std::vector<StridedMemory> inputs, outputs;
  std::vector<const void*> pointers;
  inputs.reserve(sdpa_operand_count + 2);
  for (size_t i = 0; i < sdpa_operand_count; ++i)
    if (call.types[i]) inputs.emplace_back(*call.types[i], &values.operands[i]);
  for (StridedMemory& input : inputs) pointers.push_back(input.data());
  for (const TensorType& type : compiled.forward.outputs()) outputs.emplace_back(type, nullptr);
  run_program(compiled.forward, pointers, outputs, failure);
  compare(exact.out, outputs[0].read(), "out", failure);
  if (program.lse) compare(exact.lse, outputs[1].read(), "lse", failure);
  if (compiled.backward && failure.empty()) {
    std::vector<const void*> operands;
    for (int i : compiled.backward_saved_inputs) operands.push_back(inputs[static_cast<size_t>(i)].data());
    size_t next = static_cast<size_t>(compiled.output_count);
    for (int from : compiled.saved_from_output) operands.push_back(outputs[from >= 0 ? static_cast<size_t>(from) : next++].data());
    const HostTensor* grads[] = {&values.out_grad, &values.lse_grad};
    for (int i : compiled.grad_outputs) {
      inputs.emplace_back(compiled.backward->inputs()[operands.size()], grads[i]);
      operands.push_back(inputs.back().data());
    }
    std::vector<StridedMemory> gradients;
    for (const TensorType& type : compiled.backward->outputs()) gradients.emplace_back(type, nullptr);
    run_program(*compiled.backward, operands, gradients, failure);
    std::vector<size_t> operand_of;
    for (size_t i = 0; i < sdpa_operand_count; ++i)
      if (call.types[i]) operand_of.push_back(i);
    constexpr const char* names[] = {"query", "key", "value", "mask", "sink", "alibi_slopes"};
    std::vector<bool> seen(sdpa_gradient_count, false);
    for (size_t g = 0; g < gradients.size(); ++g) {
      const size_t operand = operand_of[static_cast<size_t>(compiled.inputs_with_grad[g])];
      compare(exact.gradients.at(operand), gradients[g].read(), std::string("gradient of ") + names[operand], failure);
      seen[operand] = true;
    }
    for (size_t i = 0; i < seen.size(); ++i)
      if (!exact.gradients[i].value.empty() && !seen[i]) failure = std::string("no gradient of ") + names[i];
  }
  for (StridedMemory& input : inputs)
    if (!input.unchanged()) failure = "an operand changed";
  return failure;
}

std::string failure_of(const AttentionCall& call) {
  try {
    const Compiled program = compile_call(call);
    const std::string claims = check_claims(call, *program.compiled);
    return claims.empty() ? run_call(call, program) : claims;
  } catch (const ShapeError&) {
    return {};  // no call at all: shrinking makes such
  } catch (const TypeError&) {
    return {};
  } catch (const Error& error) {
    return error.what();
  }
}

AttentionCall shrink(AttentionCall call) {
  for (int steps = 0; steps < 400; ++steps) {
    bool smaller = false;
    for (const AttentionCall& candidate : simpler_calls(call))
      if (!failure_of(candidate).empty()) {
        call = candidate;
        smaller = true;
        break;
      }
    if (!smaller) break;
  }
  return call;
}

void report(const AttentionCall& call) {
  const AttentionCall small = shrink(call);
  ADD_FAILURE() << failure_of(small) << "\nrerun: FULMEN_ATTENTION_CALL='" << to_text(small) << "' fulmen_tests --gtest_filter='AttentionCalls*'\ndrawn: " << to_text(call);
}

class AttentionCalls : public ::testing::Test {
 protected:
  void TearDown() override {
    cpu::force_isa(cpu::available_isas().front());
    set_thread_count(0);
  }
};

TEST_F(AttentionCalls, TheLineOfACallReadsBack) {
  for (uint64_t seed = 1; seed < 200; ++seed) {
    const std::string text = to_text(draw_call(seed));
    EXPECT_EQ(to_text(parse_call(text)), text);
  }
}

// A bound that lets everything pass would test nothing: a result that is off by a few roundings is told.
TEST_F(AttentionCalls, AWrongResultIsTold) {
  const AttentionCall call = parse_call("runner=kernels isa=generic threads=1 style=0 values=3 query=f32[1,1,5,8]! key=f32[1,1,7,8]! value=f32[1,1,7,8]! scale=0.5");
  AttentionCall other = call;
  const Compiled program = compile_call(call);
  EXPECT_EQ(run_call(call, program), "");
  for (const char* attribute : {"scale=0.50001", "softcap=10", "window_left=2", "is_causal=true"}) {
    other = parse_call(to_text(call) + " " + attribute);
    EXPECT_NE(run_call(other, program), "") << attribute;
  }
}

TEST_F(AttentionCalls, AgreeWithTheDefinition) {
  if (const char* line = std::getenv("FULMEN_ATTENTION_CALL")) {
    EXPECT_EQ(failure_of(parse_call(line)), "");
    return;
  }
  const uint64_t first = number_from("FULMEN_FUZZ_SEED", 1), count = number_from("FULMEN_FUZZ_COUNT", 700), repeats = number_from("FULMEN_FUZZ_VALUES", 2);
  const auto begin = std::chrono::steady_clock::now();
  const double limit = static_cast<double>(number_from("FULMEN_FUZZ_SECONDS", 1u << 30));
  const auto seconds = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count(); };
  const char* log = std::getenv("FULMEN_FUZZ_LOG");
  uint64_t kinds = 0, calls = 0, backwards = 0, failures = 0, by_runner[3] = {};
  const auto say = [&](bool done) {
    if (!log) return;
    std::ofstream(log, std::ios::app) << (done ? "done: " : "") << "draws " << first << " to " << first + kinds << " (" << kinds << " kinds): " << calls << " calls, " << backwards
                                      << " of them with a backward; " << by_runner[0] << " by kernels, " << by_runner[1] << " by the decomposition, " << by_runner[2]
                                      << " by the reference; " << failures << " wrong; " << static_cast<int64_t>(seconds()) << " s\n";
  };
  for (uint64_t seed = first; seed < first + count && seconds() < limit && failures < 5; ++seed, ++kinds) {
    AttentionCall call = draw_call(seed);
    std::string failure;
    try {
      const Compiled program = compile_call(call);
      failure = check_claims(call, *program.compiled);
      const uint64_t values = call.values;
      // The slow runners have most of their cost in each run, the kernels in compiling.
      const uint64_t share = call.runner == Runner::reference ? 8 : call.runner == Runner::decomposition ? 4 : 1;
      for (uint64_t r = 0; r < (repeats + share - 1) / share && failure.empty(); ++r) {
        call.values = values + 2 * r;  // whether it is even chooses the layouts
        failure = run_call(call, program);
        ++calls;
        ++by_runner[static_cast<int>(call.runner)];
        backwards += program.compiled->backward.has_value();
      }
    } catch (const Error& error) {
      failure = error.what();
    }
    if (!failure.empty()) {
      ++failures;
      report(call);
    }
    if (kinds % 1000 == 999) say(false);
  }
  say(true);
  RecordProperty("calls", static_cast<int>(calls));
}

}  // namespace
}  // namespace fulmen::fuzz
