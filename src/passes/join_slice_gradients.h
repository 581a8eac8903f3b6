// The gradient of a slice pads the slice's gradient with zeros; a value that was split into slices gets the sum of such
// pads. Where the slices lie side by side the sum is their concatenation: one write instead of one a slice and the adds.
//
//   t1 = pad(a, pads=[0,0,0,4])
//   t2 = pad(b, pads=[0,0,2,2])          t5 = cat(a, b, c, dim=1)
//   t3 = add(t1, t2)              ->
//   t4 = pad(c, pads=[0,0,4,0])
//   t5 = add(t3, t4)
#pragma once

#include "ir/trace.h"

namespace fulmen {

Trace join_slice_gradients(const Trace& trace);

}  // namespace fulmen
