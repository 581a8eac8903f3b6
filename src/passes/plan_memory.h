// Gives every value of a claimed trace its memory: outputs and inputs lie in the caller's, views in their operand's, all
// else in one arena, where memory is reused once its last reader has run. Kernels' workspaces lie in the arena too.
#pragma once

#include "ops/op_def.h"
#include "runtime/program.h"

namespace fulmen {

struct MemoryPlan {
  std::vector<Slot> slots;                 // one a value
  std::vector<int64_t> workspace_offsets;  // one a node
  size_t arena_bytes = 0;
};

// workspace_bytes: one a node. Views are the nodes that alias_views marked.
MemoryPlan plan_memory(const Trace& trace, const std::vector<size_t>& workspace_bytes);

}  // namespace fulmen
