// The executor `onednn`: convolutions and their two adjoints on the CPU by oneDNN 2 (Debian's libdnnl2, opened at run
// time). This header is all that other folders need; it sees no vendor header, and where Fulmen was built without them
// the same function exists and the executor says why nothing is claimed.
#pragma once

#include <memory>

#include "executors/executor.h"

namespace fulmen::onednn {

// Ops convolution, convolution_input_grad and convolution_weight_grad, in f32 and bf16. A claim holds the primitives
// that will run: oneDNN has accepted those very shapes.
std::shared_ptr<const Executor> make_onednn_executor();

}  // namespace fulmen::onednn
