// The strict answer for one problem: known faults, then the library's word on both graphs.
#pragma once

#include <string>
#include <variant>

#include "executors/cudnn/graph.h"
#include "executors/executor.h"

namespace fulmen::cudnn {

struct Proof {
  Problem problem;  // as it will run: cures of known faults applied
  Answer forward;
  Answer backward;  // training only
  std::unique_ptr<Graph> forward_graph, backward_graph;  // with a handle: to build the plans from
};

struct ProofOptions {
  int version = 0;
  std::string target_name;
  int64_t workspace_limit_bytes = 0;
  bool forward_only = false;  // what a weaker checker would ask
  std::string ignored_faults;
};

// Throws DeviceError for an answer that is neither yes nor no. `asked` counts graphs.
std::variant<Proof, Refusal> prove(Problem problem, const Side& side, const ProofOptions& options, int& asked);

}  // namespace fulmen::cudnn
