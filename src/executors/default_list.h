// The default executor list, in the order in which executors are asked.
#pragma once

#include "executors/executor.h"

namespace fulmen {

ExecutorList default_executors();

}  // namespace fulmen
