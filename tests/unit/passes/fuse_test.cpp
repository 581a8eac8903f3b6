// The fuse pass with the real cpu executor: what joins, what must not, and that the numbers stay.
#include "passes/fuse.h"

#include <gtest/gtest.h>

#include <random>

#include "executors/cpu/cpu.h"
#include "executors/reference/evaluate.h"
#include "executors/reference/reference.h"
#include "ir/verify.h"
#include "ops/builder.h"
#include "passes/alias_views.h"
#include "passes/claim_nodes.h"
#include "passes/decompose.h"
#include "passes/remove_dead_nodes.h"

namespace fulmen {
namespace {

Trace fused(Trace trace) {
  const ExecutorList executors = {cpu::make_cpu_executor(), reference::make_reference_executor()};
  const Target target;
  trace = decompose(trace, [&](const Trace& now, const Node& node) { return claim_call(call_of(now, node), executors, target).winner != nullptr; });
  trace = alias_views(trace);
  trace = claim_nodes(trace, executors, target, false, "forward", nullptr);
  trace = fuse(trace, executors, target);
  trace = remove_dead_nodes(trace);
  verify(trace, "fuse");
  return trace;
}

std::vector<std::string> kernels(const Trace& trace) {
  std::vector<std::string> names;
  for (const Node& node : trace.nodes)
    if (node.executor != view_executor) names.push_back(node.op->name);
  return names;
}

void expect_same_numbers(const Trace& before, const Trace& after) {
  std::mt19937 generator(5);
  std::vector<HostTensor> inputs;
  for (ValueId id : before.inputs) {
    HostTensor tensor;
    tensor.type = contiguous_type(before.type(id).dtype, before.type(id).shape);
    tensor.f.resize(static_cast<size_t>(tensor.type.element_count()));
    for (double& x : tensor.f) x = std::uniform_real_distribution<double>(-1, 1)(generator);
    inputs.push_back(std::move(tensor));
  }
  const auto a = evaluate(before, inputs), b = evaluate(after, inputs);
  ASSERT_EQ(a.size(), b.size());
  for (size_t k = 0; k < a.size(); ++k)
    for (int64_t i = 0; i < a[k].type.element_count(); ++i) ASSERT_NEAR(a[k].at(i), b[k].at(i), 1e-9) << "output " << k << " element " << i;
}

TEST(Fuse, SoftmaxIsOneKernel) {
  Trace trace;
  const ValueId x = trace.add_input(parse_tensor_spec("f32[8,64]"));
  Builder b(trace);
  trace.outputs = {b.emit1("softmax", {x}, {{"dim", int64_t{-1}}})};
  const Trace result = fused(trace);
  EXPECT_EQ(kernels(result), std::vector<std::string>{"fusion"});
  expect_same_numbers(trace, result);
}

TEST(Fuse, LayerNormWithResidualAndReshapesIsOneKernel) {
  Trace trace;
  const ValueId x = trace.add_input(parse_tensor_spec("f32[2,5,64]")), y = trace.add_input(parse_tensor_spec("f32[10,64]"));
  const ValueId weight = trace.add_input(parse_tensor_spec("f32[64]")), bias = trace.add_input(parse_tensor_spec("f32[64]"));
  Builder b(trace);
  const ValueId sum = b.add(x, b.reshape(b.mul(y, 0.5), {2, 5, 64}));
  const ValueId normal = b.emit("layer_norm", {sum, weight, bias})[0];
  trace.outputs = {sum, b.reshape(normal, {10, 64})};
  const Trace result = fused(trace);
  EXPECT_EQ(kernels(result), std::vector<std::string>{"fusion"});
  expect_same_numbers(trace, result);
}

// The product in between needs the first and feeds the second: together they would wait for themselves.
TEST(Fuse, DoesNotReachAroundAProduct) {
  Trace trace;
  const ValueId x = trace.add_input(parse_tensor_spec("f32[16,16]")), w = trace.add_input(parse_tensor_spec("f32[16,16]"));
  Builder b(trace);
  const ValueId first = b.exp(x);
  const ValueId product = b.matmul(first, w);
  trace.outputs = {b.add(b.neg(product), first)};
  const Trace result = fused(trace);
  EXPECT_EQ(kernels(result), (std::vector<std::string>{"exp", "matmul", "fusion"}));
  expect_same_numbers(trace, result);
}

TEST(Fuse, ReadersOfOneLargeValueJoin) {
  Trace trace;
  const ValueId x = trace.add_input(parse_tensor_spec("f32[256,64]"));
  Builder b(trace);
  trace.outputs = {b.exp(x), b.sum(x, {0}, false), b.sum(x, {1}, false)};
  const Trace result = fused(trace);
  EXPECT_EQ(kernels(result), std::vector<std::string>{"fusion"});
  expect_same_numbers(trace, result);
}

TEST(Fuse, ConstantsAndViewsAreCopiedIntoEachGroup) {
  Trace trace;
  const ValueId x = trace.add_input(parse_tensor_spec("f32[4,6]")), w = trace.add_input(parse_tensor_spec("f32[6,6]"));
  Builder b(trace);
  const ValueId two = b.number(2.0, DType::f32);
  const ValueId a = b.exp(b.mul(x, two));
  const ValueId c = b.matmul(a, w);
  trace.outputs = {b.neg(b.mul(c, two))};
  const Trace result = fused(trace);
  EXPECT_EQ(kernels(result), (std::vector<std::string>{"fusion", "matmul", "fusion"}));
  expect_same_numbers(trace, result);
}

TEST(Fuse, KeepsReductionsOverDifferentDimsApart) {
  Trace trace;
  const ValueId x = trace.add_input(parse_tensor_spec("f32[4,6]"));
  Builder b(trace);
  trace.outputs = {b.sub(b.mul(x, b.sum(x, {0}, true)), b.sum(b.exp(x), {1}, true))};
  const Trace result = fused(trace);
  EXPECT_GT(kernels(result).size(), 1u);
  expect_same_numbers(trace, result);
}

}  // namespace
}  // namespace fulmen
