// Local rewrites that need no cost model, each exact in PyTorch's arithmetic:
//   convert to the dtype it has, reshape/permute/broadcast to the same shape, reshape of reshape, permute of permute,
//   neg of neg, mul and div by one, sum over dims of size one, contiguous (layouts come later).
//
//   t1 = reshape(x, shape=[6])
//   t2 = reshape(t1, shape=[3,2])   ->   t2 = reshape(x, shape=[3,2])
#pragma once

#include "ir/trace.h"

namespace fulmen {

Trace simplify(const Trace& trace);

}  // namespace fulmen
