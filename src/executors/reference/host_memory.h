// Between strided memory in a tensor's own dtype and HostTensors.
#pragma once

#include "ops/op_def.h"

namespace fulmen::reference {

// Reads a tensor laid out as `type` says.
HostTensor load(const TensorType& type, const void* memory);

// Writes it, floats rounded to nearest even, integers wrapped. Only elements of the tensor are touched.
void store(const HostTensor& tensor, const TensorType& type, void* memory);

}  // namespace fulmen::reference
