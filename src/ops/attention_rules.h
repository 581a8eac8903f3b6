// The rules of attention calls: ranks and broadcasting beyond the four dims of SdpaCall. The catalogue entries are in
// attention.cpp, the arithmetic in attention_parts.h.
#pragma once

#include "ops/builder.h"
#include "ops/sdpa_call.h"

namespace fulmen {

// The operands of an sdpa node as its canonical form has them: four dims, one batch size, mask of four dims, i32 lengths.
// Reshapes, broadcasts and conversions only.
std::vector<ValueId> bring_to_four_dims(Builder& b, const std::vector<ValueId>& inputs, const Attributes& attrs);

// The result's dims before (query_len, value_dim): batch dims broadcast, then heads; as many as the widest operand has.
Dims sdpa_leading_dims(const std::vector<const TensorType*>& types, const Attributes& attrs);

}  // namespace fulmen
