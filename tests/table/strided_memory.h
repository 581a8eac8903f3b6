// Running one call of an executor on memory with canaries (conformance/strided_memory.h).
#pragma once

#include <vector>

#include "conformance/strided_memory.h"
#include "executors/executor.h"

namespace fulmen::table {

using namespace conformance;

// Claims and runs the one node of `trace`; a refusal is a test failure. Gives false then.
bool run_call(const Executor& executor, const Trace& trace, const Target& target, std::vector<StridedMemory>& inputs,
              std::vector<StridedMemory>& outputs);

}  // namespace fulmen::table
