// Joins neighbouring nodes of one executor into fusions, which it runs as one kernel: one pass over memory instead of
// one a node. Which nodes may join is the executor's answer (can_fuse); whether a group is one kernel is its claim for
// the whole group, so what is fused is also proven. Groups grow from producers to consumers, then groups that read the
// same value join. Constants and views come along for free: each group has its own copy.
//
//   t1: f32[8,64] = exp(x) @cpu                      t2: f32[8,64] = fusion(x, y) @cpu {
//   t2: f32[8,64] = mul(t1, y) @cpu            ->      t1 = exp(x) ; t2 = mul(t1, y)
//                                                    }
#pragma once

#include "executors/executor.h"

namespace fulmen {

Trace fuse(const Trace& trace, const ExecutorList& executors, const Target& target);

}  // namespace fulmen
