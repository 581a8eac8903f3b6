#include "executors/cudnn/known_faults.h"

#include <algorithm>

namespace fulmen::cudnn {

namespace {

constexpr int newest = 99999;

constexpr KnownFault table[] = {
    {"f32-bias-gradient", 90000, newest, 0, Cure::refuse, "the gradient of an f32 mask beside 16-bit inputs has NaN",
     "https://github.com/jax-ml/jax/issues/32242",
     [](const Problem& p) { return p.bias_gradient && p.bias->dtype != p.query.dtype; }},
    {"long-keys-not-causal", 91300, 91400, 0, Cure::refuse, "bad access with key_len above 1024, not causal",
     "https://github.com/NVIDIA/TransformerEngine/issues/2344",
     [](const Problem& p) { return !p.causal && p.key_len() > 1024; }},
    {"mask-row-for-all-queries", 90000, newest, 0, Cure::repeat_mask_row,
     "the backward with a mask of query dim 1 gives wrong gradients, and writes the mask's outside its elements",
     "benchmarks/results/cudnn_mask_row_h200.txt",
     [](const Problem& p) { return p.training && p.bias && p.bias->dims[2] == 1 && p.query_len() > 1; }},
    {"masked-half-tile", 90000, newest, 90, Cure::pass_lengths,
     "the second half of the last key tile isn't closed in the backward with a mask",
     "https://github.com/pytorch/pytorch/issues/196678",
     [](const Problem& p) { return p.training && p.bias && p.key_len() % 128 != 0; }},
    {"open-query-tile", 90000, newest, 90, Cure::pass_lengths,
     "the rest of the last query tile isn't closed in the backward",
     "https://github.com/NVIDIA/cudnn-frontend/issues/1072",
     [](const Problem& p) { return p.training && p.query_len() % 64 != 0; }},
    {"open-tail", 90000, newest, 0, Cure::pass_lengths, "the tail of the last tile isn't closed in the backward",
     "https://github.com/NVIDIA/cudnn-frontend/issues/160",
     [](const Problem& p) { return p.training && (p.key_len() % 128 != 0 || p.query_len() % 128 != 0); }},
};

}  // namespace

std::span<const KnownFault> known_faults() { return table; }

namespace {

bool names(std::string_view list, std::string_view id) {
  for (size_t at = 0; at < list.size();) {
    const size_t end = std::min(list.find(',', at), list.size());
    if (list.substr(at, end - at) == id) return true;
    at = end + 1;
  }
  return false;
}

}  // namespace

const KnownFault* find_fault(const Problem& problem, int version, int compute_capability, std::string_view ignored) {
  for (const KnownFault& fault : table) {
    if (names(ignored, fault.id)) continue;
    if (version < fault.first_version || version > fault.last_version) continue;
    if (fault.compute_capability != 0 && fault.compute_capability != compute_capability) continue;
    if (fault.cure == Cure::pass_lengths && problem.passes_lengths(true)) continue;
    if (fault.hits(problem)) return &fault;
  }
  return nullptr;
}

const KnownFault* refusing_fault(const Problem& problem, int version, int compute_capability, std::string_view ignored) {
  const KnownFault* fault = find_fault(problem, version, compute_capability, ignored);
  return fault && fault->cure == Cure::refuse ? fault : nullptr;
}

Problem cured(Problem problem, int version, int compute_capability, std::string_view ignored) {
  while (const KnownFault* fault = find_fault(problem, version, compute_capability, ignored)) {
    const std::string why = std::string(fault->what) + ", " + std::string(fault->link);
    switch (fault->cure) {
      case Cure::refuse: return problem;
      case Cure::pass_lengths:
        problem.full_lengths = true;
        problem.steps.push_back("constant sequence lengths passed to the backward: " + why);
        break;
      case Cure::repeat_mask_row:
        repeat_mask_row(problem);
        problem.steps.push_back("mask's row repeated for every query by stride 0: " + why);
        if (problem.bias_gradient) problem.steps.push_back("mask gradient summed over the queries that share an element");
        break;
    }
  }
  return problem;
}

}  // namespace fulmen::cudnn
