// From a claimed trace to a program: kernels from the executors that claimed the nodes, memory from the plan.
#pragma once

#include "executors/executor.h"
#include "runtime/program.h"

namespace fulmen {

Program build_program(const Trace& trace, const ExecutorList& executors, const Target& target);

}  // namespace fulmen
