// The families of the op catalogue, one file each; table.cpp puts them together.
#pragma once

#include <vector>

#include "ops/op_def.h"

namespace fulmen {

std::vector<OpDef> creation_ops();
std::vector<OpDef> pointwise_ops();
std::vector<OpDef> comparison_ops();
std::vector<OpDef> random_ops();
std::vector<OpDef> movement_ops();
std::vector<OpDef> indexing_ops();
std::vector<OpDef> reduction_ops();
std::vector<OpDef> cumulative_ops();
std::vector<OpDef> matmul_ops();
std::vector<OpDef> softmax_ops();
std::vector<OpDef> norm_ops();
std::vector<OpDef> loss_ops();
std::vector<OpDef> embedding_ops();
std::vector<OpDef> conv_ops();
std::vector<OpDef> attention_ops();
std::vector<OpDef> structural_ops();  // fusion

}  // namespace fulmen
