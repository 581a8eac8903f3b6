// Entry points of one instruction set's attention kernels; compiled per target. The table of them is made in
// forward.matrix.cpp.
#pragma once

#include "executors/cpu/attention/arguments.h"

namespace fulmen::cpu::FULMEN_TARGET {

size_t attention_forward_workspace(const AttentionArguments& arguments);
void attention_forward(const AttentionArguments& arguments, const AttentionRun& run);
size_t attention_backward_workspace(const AttentionArguments& arguments);
void attention_backward(const AttentionArguments& arguments, const AttentionRun& run);
AttentionKernels attention_kernels();

// Few queries over many keys, such as one new token: decode.matrix.cpp.
bool suits_decode(const AttentionArguments& arguments);
size_t decode_workspace(const AttentionArguments& arguments);
void decode(const AttentionArguments& arguments, const AttentionRun& run);
// Its backward: decode_backward.matrix.cpp.
bool suits_decode_backward(const AttentionArguments& arguments);
size_t decode_backward_workspace(const AttentionArguments& arguments);
void decode_backward(const AttentionArguments& arguments, const AttentionRun& run);

}  // namespace fulmen::cpu::FULMEN_TARGET
