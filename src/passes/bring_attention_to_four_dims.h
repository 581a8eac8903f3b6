// Attention in the one form that executors are asked about: four dims, one batch size, a mask of four dims. Calls of other
// ranks and broadcasts become that form with views around it.
//
//   y = sdpa(q, k, v)  # f32[5,8] each    ->    q4 = reshape(q) ; k4 = ... ; y4 = sdpa(q4, k4, v4) ; y = reshape(y4)
#pragma once

#include "ops/op_def.h"

namespace fulmen {

Trace bring_attention_to_four_dims(const Trace& trace);

}  // namespace fulmen
