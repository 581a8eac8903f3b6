// Compares the gradient that differentiate builds for one call with central differences of the evaluator, in float64.
#pragma once

#include <string>

#include "ops/op_def.h"

namespace fulmen::table {

// Empty if they agree, else what differs: operand, element, both numbers. `op` may be a changed copy of an entry.
std::string gradient_fault(const OpDef& op, const Sample& sample);

}  // namespace fulmen::table
