// Who can run an attention call, here or on a described device, and why the others cannot.
#pragma once

#include <string>
#include <vector>

namespace fulmen {

struct AttentionQuestion {
  std::string query, key, value;  // tensor specs, "bf16[2,32,4096,128]"; "!" marks gradient needs, see `training`
  std::string mask;               // empty: none
  bool is_causal = false;
  double dropout_p = 0.0;
  bool has_scale = false;
  double scale = 0.0;
  bool enable_gqa = false;
  bool training = false;       // query, key and value want gradients
  bool deterministic = false;
  std::string target = "cpu";  // "cpu", "cuda", a described device's name or a JSON file
};

struct ExecutorAnswer {
  std::string executor;
  bool claimed = false;
  std::string code, reason;          // of a refusal
  std::string forward_kernel, backward_kernel;
  size_t workspace_bytes = 0;
  bool deterministic = true;
};

// One answer an executor of the default list, in order; the first claimed one is the winner.
// ShapeError or TypeError for a call that no executor could mean.
std::vector<ExecutorAnswer> claims(const AttentionQuestion& question);

}  // namespace fulmen
