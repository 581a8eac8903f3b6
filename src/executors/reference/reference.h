// The executor that takes every primitive on the CPU: any dtype, any strides, plain loops. It stands last in every CPU
// list, so that every program runs, and it defines what the others must agree with.
#pragma once

#include <memory>

#include "executors/executor.h"

namespace fulmen::reference {

std::shared_ptr<const Executor> make_reference_executor();

}  // namespace fulmen::reference
