// Common subexpressions: nodes of one op with the same operands and attributes become one. Gradient rules rely on it:
// they write what they need again and the pass finds the forward's copy.
//
//   t1 = exp(x)                     t1 = exp(x)
//   t2 = exp(x)               ->    t3 = add(t1, t1)
//   t3 = add(t1, t2)                return t3
//   return t3
#pragma once

#include "ir/trace.h"

namespace fulmen {

Trace merge_equal_nodes(const Trace& trace);

}  // namespace fulmen
