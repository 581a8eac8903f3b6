// Every sample of every op of the catalogue: signature, shape rule, errors, the reference kernel on strided memory with
// canaries around it, and the gradient. Names are op_sample; each failure prints the line that runs it again.
#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <set>

#include "executors/reference/evaluate.h"
#include "executors/reference/host_memory.h"
#include "executors/reference/reference.h"
#include "ir/print.h"
#include "ir/verify.h"
#include "ops/reference_loops.h"
#include "passes/decompose.h"
#include "tests/table/gradient_check.h"
#include "tests/table/sample_call.h"
#include "tests/table/strided_memory.h"

namespace fulmen::table {
namespace {

class OpEntry : public ::testing::TestWithParam<const OpDef*> {};

TEST_P(OpEntry, IsComplete) {
  const OpDef& op = *GetParam();
  SCOPED_TRACE(rerun_line());
  EXPECT_FALSE(op.doc.empty());
  EXPECT_EQ(op.doc.back(), '.') << op.doc;
  EXPECT_TRUE(op.shape != nullptr);
  const auto* reason = std::get_if<NotDifferentiable>(&op.gradient);
  EXPECT_TRUE(!reason || !reason->reason.empty());
  if (op.is_primitive()) {
    EXPECT_FALSE(std::holds_alternative<ByDecomposition>(op.gradient)) << "a primitive has no decomposition to follow";
  }
  for (size_t i = 0; i + 1 < op.operands.size(); ++i)
    EXPECT_NE(op.operands[i].need, Need::variadic) << op.operands[i].name << " isn't the last operand";
  std::set<std::string> names;
  for (const OperandDef& operand : op.operands) EXPECT_TRUE(names.insert(operand.name).second) << operand.name;
  for (const AttrDef& attr : op.attributes) EXPECT_TRUE(names.insert(attr.name).second) << attr.name;
  if (op.name == "fusion") return;  // made by a pass, never called
  EXPECT_FALSE(op.samples.good.empty());
  EXPECT_FALSE(op.samples.bad.empty());
  std::set<std::string> samples;
  for (const Sample& sample : op.samples.good) EXPECT_TRUE(samples.insert(sample.name).second) << sample.name;
}

TEST_P(OpEntry, RefusesBadCalls) {
  const OpDef& op = *GetParam();
  SCOPED_TRACE(rerun_line());
  for (const BadSample& bad : op.samples.bad) {
    SCOPED_TRACE(bad.call.name);
    std::string kind = "none", words;
    try {
      trace_of(op, bad.call);
    } catch (const ShapeError& error) {
      kind = "ShapeError";
      words = error.what();
    } catch (const TypeError& error) {
      kind = "TypeError";
      words = error.what();
    }
    EXPECT_EQ(kind, bad.kind);
    EXPECT_NE(words.find(bad.words), std::string::npos) << "found: " << words << "\nwanted: " << bad.words;
    if (kind != "none") {
      EXPECT_TRUE(words.starts_with(op.name + ": ")) << words;
    }
  }
}

std::string entry_name(const ::testing::TestParamInfo<const OpDef*>& info) { return info.param->name; }
INSTANTIATE_TEST_SUITE_P(Table, OpEntry, ::testing::ValuesIn(all_ops()), entry_name);

TEST(OpTable, TorchNamesAreUnique) {
  std::map<std::string, std::string> owner;
  for (const OpDef* op : all_ops())
    for (const std::string& name : op->torch) {
      const auto [at, fresh] = owner.emplace(name, op->name);
      EXPECT_TRUE(fresh) << name << " stands at " << at->second << " and at " << op->name;
    }
}

class OpSample : public ::testing::TestWithParam<SampleCall> {};

// What the composite's parts give has the types that its shape rule promised, all the way down to primitives.
TEST_P(OpSample, GivesWhatItsShapeRuleSays) {
  SCOPED_TRACE(rerun_line());
  const OpDef& op = *GetParam().op;
  const Trace trace = trace_of(op, *GetParam().sample);
  verify(trace);
  const Trace parts = decompose(trace, [](const Trace&, const Node&) { return false; });
  verify(parts, "decompose");
  for (const Node& node : parts.nodes) EXPECT_TRUE(op_of(node).is_primitive()) << to_string(parts, node);
  ASSERT_EQ(parts.outputs.size(), trace.outputs.size());
  for (size_t i = 0; i < parts.outputs.size(); ++i) {
    const TensorType &promised = trace.type(trace.outputs[i]), &found = parts.type(parts.outputs[i]);
    EXPECT_EQ(found.shape, promised.shape) << "output " << i << " in\n" << to_string(parts);
    EXPECT_EQ(found.dtype, promised.dtype) << "output " << i << " in\n" << to_string(parts);
  }
  const auto results = evaluate(trace, values_of(op, *GetParam().sample, trace));
  for (size_t i = 0; i < results.size(); ++i) {
    const auto count = static_cast<size_t>(trace.type(trace.outputs[i]).element_count());
    EXPECT_EQ(is_float(results[i].type.dtype) ? results[i].f.size() : results[i].i.size(), count);
  }
}

// The reference executor, on memory laid out as the sample says, against the evaluator; nothing beside the result changes.
TEST_P(OpSample, ReferenceKernelKeepsToItsMemory) {
  SCOPED_TRACE(rerun_line());
  const OpDef& op = *GetParam().op;
  if (!op.is_primitive()) return;  // its parts are samples of their own
  const Trace trace = trace_of(op, *GetParam().sample);
  const auto values = values_of(op, *GetParam().sample, trace);
  const auto expected = evaluate(trace, values);
  const auto executor = reference::make_reference_executor();
  const Target target;
  std::vector<StridedMemory> inputs;
  std::vector<StridedMemory> outputs;
  for (size_t i = 0; i < values.size(); ++i) inputs.emplace_back(trace.type(trace.inputs[i]), &values[i]);
  for (ValueId id : trace.outputs) outputs.emplace_back(trace.type(id), nullptr);
  run_call(*executor, trace, target, inputs, outputs);
  for (size_t i = 0; i < outputs.size(); ++i) {
    EXPECT_TRUE(outputs[i].canaries_intact()) << "output " << i;
    const HostTensor found = outputs[i].read();
    const DType dtype = found.type.dtype;
    for (int64_t k = 0; k < found.type.element_count(); ++k) {
      const auto at = static_cast<size_t>(k);
      if (!is_float(dtype)) {
        ASSERT_EQ(found.i[at], expected[i].i[at]) << "output " << i << " element " << k;
        continue;
      }
      const double wanted = round_float(expected[i].f[at], dtype);
      if (std::isnan(wanted)) {
        ASSERT_TRUE(std::isnan(found.f[at])) << "output " << i << " element " << k;
        continue;
      }
      ASSERT_EQ(found.f[at], wanted) << "output " << i << " element " << k;
    }
  }
  for (size_t i = 0; i < inputs.size(); ++i) EXPECT_TRUE(inputs[i].unchanged()) << "input " << i;
}

TEST_P(OpSample, GradientAgreesWithDifferences) {
  SCOPED_TRACE(rerun_line());
  const OpDef& op = *GetParam().op;
  if (std::holds_alternative<NotDifferentiable>(op.gradient)) return;
  try {
    EXPECT_EQ(gradient_fault(op, *GetParam().sample), "");
  } catch (const UnsupportedError& error) {
    // Said at trace time, in words, is right; a wrong number isn't. Only gradients of gradients may say so.
    EXPECT_TRUE(op.name.ends_with("_grad")) << error.what();
  }
}

std::string sample_name(const ::testing::TestParamInfo<SampleCall>& info) { return info.param.id; }
INSTANTIATE_TEST_SUITE_P(Table, OpSample, ::testing::ValuesIn(all_sample_calls()), sample_name);

// The tests are tested: a rule that is wrong by a thousandth, and one that forgets to sum what was broadcast, are found.
TEST(OpTable, ACorruptedGradientRuleIsCaught) {
  OpDef bent = require_op("tanh");
  bent.gradient = GradientRule([](Builder& b, const GradientArgs& args) -> std::vector<ValueId> {
    return {b.mul(b.emit1("tanh_grad", {args.outputs[0], args.output_grads[0]}), 1.001)};
  });
  EXPECT_EQ(gradient_fault(require_op("tanh"), bent.samples.good[0]), "");
  EXPECT_NE(gradient_fault(bent, bent.samples.good[0]), "");

  OpDef unsummed = require_op("add");
  unsummed.gradient = GradientRule([](Builder&, const GradientArgs& args) -> std::vector<ValueId> {
    return {args.output_grads[0], args.output_grads[0]};
  });
  const Sample row{"row", {"f32[4,7]!", "f32[7]!"}, {}};
  EXPECT_EQ(gradient_fault(require_op("add"), row), "");
  EXPECT_THROW(gradient_fault(unsummed, row), InternalError);
}

TEST(StridedMemory, AWriteBesideTheTensorIsSeen) {
  const TensorType type = parse_tensor_spec("f32[3,2]{stride=4,1}");
  StridedMemory memory(type, nullptr);
  EXPECT_TRUE(memory.canaries_intact());
  static_cast<float*>(memory.data())[3] = 1.0f;  // in a row gap
  EXPECT_FALSE(memory.canaries_intact());
  StridedMemory second(type, nullptr);
  static_cast<float*>(second.data())[10] = 1.0f;  // one past the end
  EXPECT_FALSE(second.canaries_intact());
}

}  // namespace
}  // namespace fulmen::table
