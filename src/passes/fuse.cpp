#include "passes/fuse.h"

namespace fulmen {

Trace fuse(const Trace& trace, const ExecutorList&, const Target&) { return trace; }

}  // namespace fulmen
