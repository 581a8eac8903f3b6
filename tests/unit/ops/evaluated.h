// Runs one op on numbers written in a test, by the evaluator: results, and gradients of a sum of results weighted by given
// cotangents. For the ops' own tests; the op table's tests are in tests/table.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "executors/reference/evaluate.h"
#include "ir/verify.h"
#include "ops/builder.h"
#include "ops/reference_loops.h"
#include "passes/decompose.h"
#include "passes/differentiate.h"

namespace fulmen::testing_ops {

// "f32[2,3]" and its elements in row-major order; a single element fills the tensor. An empty spec is an absent operand.
struct Operand {
  std::string spec;
  std::vector<double> values;
};
inline Operand absent() { return {}; }

inline HostTensor host_of(const TensorType& type, const std::vector<double>& values) {
  HostTensor host = make_host(type);
  for (int64_t k = 0; k < host.type.element_count(); ++k) host.set(k, values.size() == 1 ? values[0] : values.at(static_cast<size_t>(k)));
  return host;
}

struct OpRun {
  Trace trace;
  std::vector<HostTensor> inputs, outputs;
};

inline OpRun run_op(std::string_view op, const std::vector<Operand>& operands, const Attributes& attrs = {}) {
  OpRun run;
  std::vector<ValueId> ids;
  for (const Operand& operand : operands) {
    if (operand.spec.empty()) {
      ids.push_back(no_value);
      continue;
    }
    const TensorType type = parse_tensor_spec(operand.spec);
    ids.push_back(run.trace.add_input(type));
    run.inputs.push_back(host_of(type, operand.values));
  }
  Builder builder(run.trace);
  run.trace.outputs = builder.emit(op, ids, attrs);
  verify(run.trace, "the test");
  run.outputs = evaluate(run.trace, run.inputs);
  return run;
}

// Gradients of the inputs marked with '!', in order; cotangents of ones unless given, one a result.
inline std::vector<HostTensor> gradients(const OpRun& run, const std::vector<HostTensor>& cotangents = {}) {
  const Trace parts = decompose(run.trace, [](const Trace&, const Node& node) {
    return !std::holds_alternative<ByDecomposition>(op_of(node).gradient);
  });
  const JointTrace joint = differentiate(parts);
  verify(joint.trace, "differentiate");
  std::vector<HostTensor> inputs = run.inputs;
  for (size_t i = 0; i < joint.grad_outputs.size(); ++i) {
    const TensorType& type = run.trace.type(run.trace.outputs[static_cast<size_t>(joint.grad_outputs[i])]);
    inputs.push_back(i < cotangents.size() ? cotangents[i] : host_of(type, {1.0}));
  }
  const auto results = evaluate(joint.trace, inputs);
  return {results.begin() + joint.output_count, results.end()};
}

}  // namespace fulmen::testing_ops
