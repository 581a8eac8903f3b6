// Every executor of the default list on every sample of the op table that it claims for this machine's CPU: numbers
// against the float64 evaluator, canaries around the memory, inputs unchanged. The budget is twice the error of the
// reference in that dtype, or 4 ulp of the result's largest element.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "executors/default_list.h"
#include "executors/reference/evaluate.h"
#include "tests/table/sample_call.h"
#include "tests/table/strided_memory.h"

namespace fulmen::table {
namespace {

double epsilon_of(DType dtype) {
  switch (dtype) {
    case DType::bf16: return 0x1p-8;
    case DType::f16: return 0x1p-11;
    case DType::f32: return 0x1p-24;
    default: return 0x1p-53;
  }
}

class OpOnExecutors : public ::testing::TestWithParam<SampleCall> {};

// `slack` multiplies the budget.
void expect_close(const HostTensor& found, const HostTensor& exact, const HostTensor& rounded, double slack, const std::string& what) {
  const DType dtype = found.type.dtype;
  const int64_t count = found.type.element_count();
  double largest = 0, reference_error = 0;
  if (is_float(dtype))
    for (size_t k = 0; k < exact.f.size(); ++k) {
      if (!std::isfinite(exact.f[k]) || !std::isfinite(rounded.f[k])) continue;
      largest = std::max(largest, std::abs(exact.f[k]));
      reference_error = std::max(reference_error, std::abs(exact.f[k] - rounded.f[k]));
    }
  // Results that are sums of larger parts (a difference of means) have no fewer bits lost than those of size 1.
  const double budget = slack * std::max(2 * reference_error, 8 * epsilon_of(dtype) * std::max(largest, 1.0));
  for (int64_t k = 0; k < count; ++k) {
    const auto at = static_cast<size_t>(k);
    if (!is_float(dtype)) {
      ASSERT_EQ(found.i[at], exact.i[at]) << what << " element " << k;
    } else if (std::isnan(rounded.f[at])) {
      ASSERT_TRUE(std::isnan(found.f[at])) << what << " element " << k << " is " << found.f[at];
    } else if (std::isinf(rounded.f[at])) {
      ASSERT_EQ(found.f[at], rounded.f[at]) << what << " element " << k;
    } else {
      ASSERT_LE(std::abs(found.f[at] - exact.f[at]), budget) << what << " element " << k << " is " << found.f[at] << ", exact " << exact.f[at];
    }
  }
}

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
      expect_close(outputs[i].read(), exact[i], rounded[i], slack, "output " + std::to_string(i));
    }
    for (size_t i = 0; i < inputs.size(); ++i) EXPECT_TRUE(inputs[i].unchanged()) << "input " << i;
  }
}

std::string sample_name(const ::testing::TestParamInfo<SampleCall>& info) { return info.param.id; }
INSTANTIATE_TEST_SUITE_P(Table, OpOnExecutors, ::testing::ValuesIn(all_sample_calls()), sample_name);

}  // namespace
}  // namespace fulmen::table
