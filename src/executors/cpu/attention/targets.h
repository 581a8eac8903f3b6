// Entry points of one instruction set's attention kernels; compiled per target. The table of them is in
// forward.matrix.cpp.
#pragma once

#include "executors/cpu/attention/arguments.h"

namespace fulmen::cpu::FULMEN_TARGET {

size_t attention_forward_workspace(const AttentionArguments& arguments);
void attention_forward(const AttentionArguments& arguments, const AttentionRun& run);
size_t attention_backward_workspace(const AttentionArguments& arguments);
void attention_backward(const AttentionArguments& arguments, const AttentionRun& run);
AttentionKernels attention_kernels();

}  // namespace fulmen::cpu::FULMEN_TARGET
