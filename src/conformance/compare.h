// Are results right? Against the float64 evaluator, with a budget that follows the dtype.
#pragma once

#include <string>

#include "ops/op_def.h"

namespace fulmen::conformance {

// Empty if `found` is close enough to `exact`, else the first element that isn't. The budget is twice the error that
// `rounded` (the reference in that dtype) has, or 4 ulp of the largest element, times `slack`; integers are equal, NaN
// and infinities stand where `rounded` has them.
std::string difference(const HostTensor& found, const HostTensor& exact, const HostTensor& rounded, double slack = 1);

}  // namespace fulmen::conformance
