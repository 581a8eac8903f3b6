// Random attention calls, each with a random subset of everything the op has (masks, windows, corners, groups, sink, slopes,
// packed sequences, key lengths, dropout, softcap, strides): every executor of the default list that claims the pair, on
// both of its halves, against the float64 evaluator. The evaluator decomposes the ops, so kernels and decomposition must
// mean the same by every argument.
//   FULMEN_FUZZ_SEED=29 FULMEN_FUZZ_COUNT=1 fulmen_tests --gtest_filter='AttentionFuzz*'
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <random>

#include "executors/default_list.h"
#include "executors/reference/evaluate.h"
#include "ir/print.h"
#include "ops/builder.h"
#include "ops/reference_loops.h"
#include "ops/sdpa_call.h"
#include "tests/table/strided_memory.h"

namespace fulmen {
namespace {

using table::StridedMemory;

uint64_t number_from(const char* name, uint64_t fallback) {
  const char* text = std::getenv(name);
  return text ? std::strtoull(text, nullptr, 10) : fallback;
}

struct Drawn {
  std::vector<std::optional<TensorType>> types{sdpa_operand_count};
  std::vector<HostTensor> values{sdpa_operand_count};
  Attributes attrs;
};

class Drawing {
 public:
  explicit Drawing(uint64_t seed) : rng_(seed) {}

  Drawn call() {
    Drawn drawn;
    const bool packed = chance(5);
    const DType dtype = chance(3) ? DType::bf16 : chance(6) ? DType::f16 : DType::f32;
    const int64_t batch = packed ? 1 : size(3), groups = size(3), heads = groups * size(3);
    const int64_t head_dim = size(20), value_dim = chance(2) ? head_dim : size(20);
    const int64_t query_len = chance(12) ? 0 : size(chance(4) ? 150 : 20), key_len = chance(12) ? 0 : chance(3) ? query_len : size(chance(4) ? 150 : 20);
    put(drawn, sdpa_query, layout(dtype, {batch, heads, query_len, head_dim}));
    put(drawn, sdpa_key, layout(dtype, {batch, groups, key_len, head_dim}));
    put(drawn, sdpa_value, layout(dtype, {batch, groups, key_len, value_dim}));
    if (chance(3)) drawn.attrs.set("lower_right", true);
    if (chance(3)) drawn.attrs.set("window_left", int64_t(below(12)));
    if (chance(3)) drawn.attrs.set("window_right", int64_t(below(12)));
    if (chance(4)) drawn.attrs.set("softcap", 1.5);
    if (chance(3)) drawn.attrs.set("scale", chance(4) ? 0.0 : chance(2) ? -0.3 : 0.7);
    if (chance(3)) {
      const auto one_or = [&](int64_t n) { return chance(2) ? int64_t{1} : n; };
      const Dims shape{one_or(batch), one_or(heads), one_or(query_len), one_or(key_len)};
      put(drawn, sdpa_mask, contiguous_type(chance(2) ? DType::boolean : chance(2) ? dtype : DType::f32, shape));
    } else if (chance(2)) {
      drawn.attrs.set("is_causal", true);
    }
    if (chance(4)) put(drawn, sdpa_sink, contiguous_type(DType::f32, {heads}));
    if (chance(4)) {
      put(drawn, sdpa_alibi_slopes, contiguous_type(DType::f32, {heads}));
      // Small, or logits of hundreds make the f32 rounding of lse the largest error.
      for (double& slope : drawn.values[sdpa_alibi_slopes].f) slope = round_float(slope * 0.03, DType::f32);
    }
    if (packed) {
      const int64_t count = size(4);
      offsets(drawn, sdpa_query_offsets, count, query_len);
      offsets(drawn, sdpa_key_offsets, count, key_len);
    }
    if (chance(4)) {
      put(drawn, sdpa_key_lengths, contiguous_type(DType::i32, {batch}));
      for (int64_t& length : drawn.values[sdpa_key_lengths].i) length = static_cast<int64_t>(below(static_cast<uint64_t>(key_len) + 2));
    }
    if (chance(3)) {
      drawn.attrs.set("dropout_p", chance(6) ? 1.0 : 0.4);
      put(drawn, sdpa_seed, contiguous_type(DType::i64, {2}));
      drawn.values[sdpa_seed].i = {static_cast<int64_t>(rng_()), static_cast<int64_t>(below(1000) * 16)};
    }
    return drawn;
  }

  HostTensor normal(const TensorType& type) {
    HostTensor host = make_host(type);
    for (double& value : host.f) value = round_float(std::normal_distribution<double>()(rng_), type.dtype);
    for (int64_t& value : host.i) value = static_cast<int64_t>(rng_() % 4 != 0);
    return host;
  }
  bool chance(uint64_t one_in) { return below(one_in) == 0; }

 private:
  uint64_t below(uint64_t n) { return rng_() % n; }
  int64_t size(uint64_t most) { return 1 + static_cast<int64_t>(below(most)); }

  // Heads before or behind the length, with or without a gap.
  TensorType layout(DType dtype, const Dims& shape) {
    TensorType type = contiguous_type(dtype, shape);
    if (chance(3)) return type;
    const int64_t row = shape[3] + (chance(2) ? 3 : 0);
    if (chance(2))
      type.strides = {shape[1] * shape[2] * row, row, shape[1] * row, 1};
    else
      type.strides = {shape[1] * shape[2] * row, shape[2] * row, row, 1};
    return type;
  }
  void put(Drawn& drawn, SdpaOperand operand, TensorType type) {
    drawn.values[operand] = normal(type);
    drawn.types[operand] = std::move(type);
  }
  void offsets(Drawn& drawn, SdpaOperand operand, int64_t count, int64_t length) {
    put(drawn, operand, contiguous_type(DType::i32, {count + 1}));
    auto& values = drawn.values[operand].i;
    for (int64_t& value : values) value = static_cast<int64_t>(below(static_cast<uint64_t>(length) + 1));
    std::sort(values.begin(), values.end());
    if (chance(2)) values.front() = 0;
    if (chance(2)) values.back() = length;
  }

  std::mt19937_64 rng_;
};

struct Program {
  Trace trace;
  std::vector<HostTensor> values;
};

Program program_of(const Drawn& drawn, std::string_view op, std::vector<HostTensor> more, Attributes attrs) {
  Program program;
  std::vector<ValueId> ids;
  for (size_t i = 0; i < sdpa_operand_count; ++i) {
    ids.push_back(drawn.types[i] ? program.trace.add_input(*drawn.types[i]) : no_value);
    if (drawn.types[i]) program.values.push_back(drawn.values[i]);
  }
  for (HostTensor& value : more) {
    ids.push_back(program.trace.add_input(value.type));
    program.values.push_back(std::move(value));
  }
  Builder builder(program.trace);
  program.trace.outputs = builder.emit(op, ids, std::move(attrs));
  return program;
}

// Results of the program's one node on an executor; nothing where it refuses.
std::optional<std::vector<HostTensor>> run_on(const Executor& executor, Program& program) {
  const Node& node = program.trace.nodes[0];
  const Call call = call_of(program.trace, node);
  const Target target;
  const Claim claim = executor.claim(call, target);
  if (!is_claimed(claim)) return std::nullopt;
  const auto kernel = executor.make_kernel(call, std::get<Plan>(claim), target);
  std::vector<StridedMemory> inputs, outputs;
  for (size_t i = 0; i < program.values.size(); ++i) inputs.emplace_back(program.trace.type(program.trace.inputs[i]), &program.values[i]);
  std::vector<const void*> in;
  std::vector<void*> out;
  size_t given = 0;
  for (ValueId id : node.inputs) in.push_back(id == no_value ? nullptr : inputs[given++].data());
  outputs.reserve(node.outputs.size());
  for (ValueId id : node.outputs) {
    if (id == no_value) {
      out.push_back(nullptr);
      continue;
    }
    outputs.emplace_back(program.trace.type(id), nullptr);
    out.push_back(outputs.back().data());
  }
  std::vector<char> workspace(kernel->workspace_bytes() + 64);
  RunContext context;
  context.workspace = workspace.data() + (64 - reinterpret_cast<uintptr_t>(workspace.data()) % 64) % 64;
  kernel->run(context, in.data(), out.data());
  std::vector<HostTensor> results;
  for (StridedMemory& memory : outputs) {
    EXPECT_TRUE(memory.canaries_intact()) << "bytes beside a result changed";
    results.push_back(memory.read());
  }
  for (StridedMemory& memory : inputs) EXPECT_TRUE(memory.unchanged()) << "an operand changed";
  return results;
}

// Sums of up to 150 products; errors are relative to the largest element, in half precision to that of the operands too.
void expect_close(const HostTensor& found, const HostTensor& exact, DType operands, const std::string& what) {
  const double unit = operands == DType::f32 ? 2e-6 : operands == DType::bf16 ? 0x1p-6 : 0x1p-9;
  double largest = 1.0;
  for (double value : exact.f)
    if (std::isfinite(value)) largest = std::max(largest, std::abs(value));
  for (size_t k = 0; k < exact.f.size(); ++k) {
    if (!std::isfinite(exact.f[k]))
      ASSERT_EQ(found.f[k], exact.f[k]) << what << ", element " << k;
    else
      ASSERT_LE(std::abs(found.f[k] - exact.f[k]), 4 * unit * largest) << what << ", element " << k << " is " << found.f[k] << ", exact " << exact.f[k];
  }
}

TEST(AttentionFuzz, ExecutorsAgreeWithTheDecomposition) {
  const uint64_t first = number_from("FULMEN_FUZZ_SEED", 1), count = number_from("FULMEN_FUZZ_COUNT", 150);
  const ExecutorList executors = default_executors();
  uint64_t forwards = 0, backwards = 0;
  for (uint64_t seed = first; seed < first + count && !::testing::Test::HasFailure(); ++seed) {
    Drawing drawing(seed);
    const Drawn drawn = drawing.call();
    Program forward = program_of(drawn, "sdpa_forward", {}, drawn.attrs);
    SCOPED_TRACE("rerun: FULMEN_FUZZ_SEED=" + std::to_string(seed) + " FULMEN_FUZZ_COUNT=1 fulmen_tests --gtest_filter='AttentionFuzz*'\n" + to_string(forward.trace));
    auto results = evaluate(forward.trace, forward.values);
    const DType dtype = drawn.types[sdpa_query]->dtype;
    // What the backward reads has the precision that a forward kernel leaves.
    std::vector<HostTensor> more = results;
    for (HostTensor& value : more)
      for (double& element : value.f) element = round_float(element, value.type.dtype);
    more.push_back(drawing.normal(more[0].type));
    Attributes attrs = drawn.attrs;
    Dims needs;
    for (size_t i = 0; i < sdpa_gradient_count; ++i)
      needs.push_back(drawn.types[i] && is_float(drawn.types[i]->dtype) && !drawing.chance(5));
    attrs.set("needs", needs);
    Program backward = program_of(drawn, "sdpa_backward", more, attrs);
    Node& node = backward.trace.nodes[0];
    backward.trace.outputs.clear();
    for (size_t i = 0; i < sdpa_gradient_count; ++i) {
      if (needs[i])
        backward.trace.outputs.push_back(node.outputs[i]);
      else
        node.outputs[i] = no_value;
    }
    const auto gradients = evaluate(backward.trace, backward.values);
    for (const auto& executor : executors) {
      if (executor->name() == "reference" || !executor->unavailable_reason().empty()) continue;
      SCOPED_TRACE(std::string(executor->name()));
      if (const auto found = run_on(*executor, forward)) {
        ++forwards;
        for (size_t i = 0; i < 2; ++i) expect_close(found->at(i), results[i], dtype, i ? "lse" : "out");
      }
      if (const auto found = run_on(*executor, backward)) {
        ++backwards;
        for (size_t i = 0; i < gradients.size(); ++i) expect_close(found->at(i), gradients[i], dtype, "gradient " + std::to_string(i));
      }
    }
  }
  if (!::testing::Test::HasFailure() && count > 50) {
    EXPECT_GT(forwards, count / 2) << "hardly any call was claimed";
    EXPECT_GT(backwards, count / 2) << "hardly any backward was claimed";
  }
}

}  // namespace
}  // namespace fulmen
