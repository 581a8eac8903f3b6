// Replaces composite ops by their decompositions, recursively, except those that `keep` wants whole. What is kept is the
// caller's question: before differentiation, ops with their own gradient rule; after it, ops that an executor claims.
//
//   y = softmax(x, dim=-1)    ->    m = amax(x) ; s = sub(x, m) ; e = exp(s) ; z = sum(e) ; y = div(e, z)
#pragma once

#include <functional>

#include "ops/op_def.h"

namespace fulmen {

Trace decompose(const Trace& trace, const std::function<bool(const Trace&, const Node&)>& keep);

}  // namespace fulmen
