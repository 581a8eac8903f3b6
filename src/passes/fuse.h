// Joins neighbouring nodes of one executor into fusions, which it runs as one kernel.
#pragma once

#include "executors/executor.h"

namespace fulmen {

Trace fuse(const Trace& trace, const ExecutorList& executors, const Target& target);

}  // namespace fulmen
