// cross_entropy and its gradient over rows of logits, each row read from memory once a direction. Class indices, no
// class weights, classes along the last dim and adjacent; other calls are decomposed and fused.
#pragma once

#include <memory>

#include "executors/executor.h"

namespace fulmen::cpu {

// Of ops cross_entropy and cross_entropy_grad.
Claim claim_cross_entropy(const Call& call);
std::unique_ptr<Kernel> make_cross_entropy_kernel(const Call& call);

}  // namespace fulmen::cpu
