// Every executor of the default list on every sample of the op table that it claims for this machine's CPU: numbers
// against the float64 evaluator with the budget of conformance/compare.h, canaries around the memory, inputs unchanged.
#include <gtest/gtest.h>

#include "conformance/compare.h"
#include "executors/default_list.h"
#include "executors/reference/evaluate.h"
#include "tests/table/sample_call.h"
#include "tests/table/strided_memory.h"

namespace fulmen::table {
namespace {

class OpOnExecutors : public ::testing::TestWithParam<SampleCall> {};

TEST_P(OpOnExecutors, AgreesWithTheEvaluator) {
  SCOPED_TRACE(rerun_line());
  static const ExecutorList executors = default_executors();
  const OpDef& op = *GetParam().op;
  if (op.name == "sdpa") return;  // a claim of it means the pair; what runs is sdpa_forward and sdpa_backward
  const Trace trace = trace_of(op, *GetParam().sample, Marks::none);
  const auto values = values_of(op, *GetParam().sample, trace);
  const auto exact = evaluate(trace, values);
  // Drawn statistics are no softmax's: its exponentials are in the hundreds, and their sums cancel.
  const double slack = op.name == "sdpa_backward" ? 8 : 1;
  const auto rounded = evaluate(trace, values, {.round = true});
  const Target target;
  const Call call = call_of(trace, trace.nodes[0]);
  for (const auto& executor : executors) {
    if (executor->name() == "reference" || !executor->unavailable_reason().empty()) continue;
    if (!is_claimed(executor->claim(call, target))) continue;
    SCOPED_TRACE(std::string(executor->name()));
    std::vector<StridedMemory> inputs, outputs;
    for (size_t i = 0; i < values.size(); ++i) inputs.emplace_back(trace.type(trace.inputs[i]), &values[i]);
    for (ValueId id : trace.outputs) outputs.emplace_back(trace.type(id), nullptr);
    if (!run_call(*executor, trace, target, inputs, outputs)) continue;
    for (size_t i = 0; i < outputs.size(); ++i) {
      EXPECT_TRUE(outputs[i].canaries_intact()) << "bytes beside output " << i << " changed";
      EXPECT_EQ(difference(outputs[i].read(), exact[i], rounded[i], slack), "") << "output " << i;
    }
    for (size_t i = 0; i < inputs.size(); ++i) EXPECT_TRUE(inputs[i].unchanged()) << "input " << i;
  }
}

std::string sample_name(const ::testing::TestParamInfo<SampleCall>& info) { return info.param.id; }
INSTANTIATE_TEST_SUITE_P(Table, OpOnExecutors, ::testing::ValuesIn(all_sample_calls()), sample_name);

}  // namespace
}  // namespace fulmen::table
