#include "tests/table/gradient_check.h"

#include <algorithm>
#include <cmath>

#include "executors/reference/evaluate.h"
#include "ir/print.h"
#include "ir/verify.h"
#include "passes/decompose.h"
#include "passes/differentiate.h"
#include "tests/table/sample_call.h"

namespace fulmen::table {
namespace {

constexpr double step = 1e-5;
constexpr double tolerance = 1e-6;  // central differences are off by step^2 times the third derivative, and rounding
constexpr int64_t most_probes = 40;  // elements probed an operand

bool has_own_rule(const Trace&, const Node& node) { return !std::holds_alternative<ByDecomposition>(op_of(node).gradient); }

// sum over all float outputs of output * weight
double weighted_sum(const Trace& trace, const std::vector<HostTensor>& inputs, const std::vector<int>& outputs,
                    const std::vector<HostTensor>& weights) {
  const auto results = evaluate(trace, inputs);
  double total = 0;
  for (size_t k = 0; k < outputs.size(); ++k) {
    const HostTensor& result = results[static_cast<size_t>(outputs[k])];
    for (size_t j = 0; j < result.f.size(); ++j)
      if (std::isfinite(result.f[j])) total += result.f[j] * weights[k].f[j];  // a mask's -inf doesn't move
  }
  return total;
}

}  // namespace

std::string gradient_fault(const OpDef& op, const Sample& sample) {
  const Trace trace = trace_of(op, sample, gradient_marks(sample));
  std::vector<HostTensor> inputs = values_of(op, sample, trace, Values::generic);
  const JointTrace joint = differentiate(decompose(trace, has_own_rule));
  verify(joint.trace, "differentiate");
  std::vector<HostTensor> all = inputs, weights;
  for (size_t k = 0; k < joint.grad_outputs.size(); ++k) {
    weights.push_back(normal_values(trace.type(trace.outputs[static_cast<size_t>(joint.grad_outputs[k])]), 100 + k));
    // The statistics that batch_norm gives beside its result are for the running averages, which take no gradient.
    if (op.name == "batch_norm" && joint.grad_outputs[k] > 0) std::fill(weights[k].f.begin(), weights[k].f.end(), 0.0);
    all.push_back(weights.back());
  }
  const auto results = evaluate(joint.trace, all);
  for (size_t g = 0; g < joint.inputs_with_grad.size(); ++g) {
    const auto at = static_cast<size_t>(joint.inputs_with_grad[g]);
    const HostTensor& gradient = results[static_cast<size_t>(joint.output_count) + g];
    const TensorType& type = trace.type(trace.inputs[at]);
    const std::string name = trace.value(trace.inputs[at]).name;
    if (gradient.type.shape != type.shape || gradient.type.dtype != type.dtype)
      return "the gradient of " + name + " is " + to_string(gradient.type) + ", the operand " + to_string(type);
    const int64_t count = type.element_count(), stride = std::max<int64_t>(1, count / most_probes);
    for (int64_t k = 0; k < count; k += stride) {
      double& element = inputs[at].f[static_cast<size_t>(k)];
      const double middle = element;
      element = middle + step;
      const double above = weighted_sum(trace, inputs, joint.grad_outputs, weights);
      element = middle - step;
      const double below = weighted_sum(trace, inputs, joint.grad_outputs, weights);
      element = middle;
      const double expected = (above - below) / (2 * step), found = gradient.f[static_cast<size_t>(k)];
      const double scale = std::max({1.0, std::abs(expected), std::abs(found)});
      if (!(std::abs(expected - found) <= tolerance * scale))
        return "the gradient of " + name + " at element " + std::to_string(k) + " is " + std::to_string(found) +
               ", central differences give " + std::to_string(expected) + " in\n" + to_string(joint.trace);
    }
  }
  return {};
}

}  // namespace fulmen::table
