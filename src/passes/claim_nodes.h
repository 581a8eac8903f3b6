// Gives each node to the first executor that proves it can run that call.
//
// claim_pairs runs before differentiation: a composite that an executor claims forward and backward (attention) becomes
// the executor's own pair and keeps its saved statistics. claim_nodes runs last, on the layouts that really arise.
//
//   out = sdpa(q, k, v)    ->    (out, lse) = sdpa_forward(q, k, v) @cpu
#pragma once

#include "claiming/claim.h"

namespace fulmen {

// What was asked and answered for one node; kept for explain.
struct NodeClaim {
  std::string node, op, direction;
  std::vector<ClaimAnswer> answers;
};

Trace claim_pairs(const Trace& trace, const ExecutorList& executors, const Target& target, bool training, bool deterministic,
                  std::vector<NodeClaim>* records);

// Every node that isn't a view and has no executor yet. Throws UnsupportedError with all reasons if nobody claims one.
Trace claim_nodes(const Trace& trace, const ExecutorList& executors, const Target& target, bool deterministic,
                  std::string_view direction, std::vector<NodeClaim>* records);

}  // namespace fulmen
