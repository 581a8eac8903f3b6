// Interprets a trace on host tensors, node by node, by the reference meaning of each op; composites run as their
// decompositions. Floats are kept in float64 whatever their dtype says, so the result is the oracle of the tests: what
// the program means with no rounding. Slow; for tests, audits and replays.
#pragma once

#include <vector>

#include "ops/op_def.h"

namespace fulmen {

struct EvaluateOptions {
  // Rounds every float to its value's dtype after each node, as an executor that runs node by node would.
  bool round = false;
};

// One tensor an input of the trace, of its shape and dtype; gives one an output (empty for "none"). InternalError if
// the inputs don't fit.
std::vector<HostTensor> evaluate(const Trace& trace, const std::vector<HostTensor>& inputs, const EvaluateOptions& options = {});

// One node on its operands (null where absent). A composite is decomposed; a fusion runs its body.
std::vector<HostTensor> evaluate_node(const Trace& trace, const Node& node, const std::vector<const HostTensor*>& inputs,
                                      const EvaluateOptions& options = {});

}  // namespace fulmen
