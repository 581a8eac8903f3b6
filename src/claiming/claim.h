// Walks the executor list for one call: the first executor that proves it can run it wins; every refusal is kept.
#pragma once

#include <string>
#include <vector>

#include "core/error.h"
#include "executors/executor.h"

namespace fulmen {

struct ClaimAnswer {
  std::string executor;
  Claim claim;
};

struct ClaimOutcome {
  std::vector<ClaimAnswer> answers;  // in list order, up to and including the winner
  const Executor* winner = nullptr;  // null: nobody claimed
  std::shared_ptr<const Plan> plan;
};

// Asks in order until one claims; with `ask_all` the rest is asked too (for tables; the winner stays the first).
// Executors that are unavailable refuse with code unavailable, unless the target is only described.
ClaimOutcome claim_call(const Call& call, const ExecutorList& executors, const Target& target, bool ask_all = false);

// The error for a call that nobody claims, with every refusal: "sdpa: no executor claims it\n  cudnn: ... [code]\n  cpu: ...".
// `where` stands behind it.
UnsupportedError unclaimed(std::string_view op, const std::vector<ClaimAnswer>& answers, const std::string& where = {});

}  // namespace fulmen
