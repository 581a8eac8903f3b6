// Audit: the first use of each claimed call is compared with the op's decomposition, computed on the CPU by the other
// executors; where they differ by more than rounding explains, the claim is revoked (driver/revocation.h). It finds
// wrong numbers of a library that said yes, at the price of running everything a second and third time, once a call.
//
// What rounding explains: each result is compared with the decomposition D of the same inputs, and with D' of inputs
// whose last bit is changed here and there. An element may be off by 16 (units of its row's largest + what D' - D shows
// for its row), so a gradient that is the difference of large terms isn't taken for wrong.
//
// Left out: attention with dropout (executors draw masks of their own), calls while a CUDA graph is captured, and calls
// that no other executor can compute.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "executors/executor.h"
#include "runtime/kernel.h"

namespace fulmen {

// On if FULMEN_AUDIT is set to anything but 0 when it is first asked; set_audit decides from then on.
bool audit_enabled();
bool set_audit(bool on);  // gives what it was

struct AuditCounts {
  int64_t checked = 0;    // calls compared
  int64_t differing = 0;  // of them, claims that were revoked
  int64_t left_out = 0;
};
AuditCounts audit_counts();

// One call, before its kernel runs: its inputs are copied.
class AuditSample {
 public:
  // Null where there is nothing to compare. `single`: the node alone as a trace, its inputs in the order of `inputs`;
  // `others`: the executors without the one under audit.
  static std::unique_ptr<AuditSample> take(const Trace& single, const ExecutorList& others, const std::string& executor,
                                           const Target& target, const RunContext& context,
                                           const std::vector<const void*>& inputs);

  // After the run: empty if the results are right, else how they differ. `types`: of the results as they lie in memory.
  std::string compare(const std::vector<const void*>& results, const std::vector<TensorType>& types) const;

 private:
  AuditSample() = default;
  std::vector<std::vector<double>> expected(bool nudged) const;

  Trace reference_;  // decomposed, on the CPU
  ExecutorList others_;
  Target target_;
  RunContext context_;
  std::vector<std::vector<char>> inputs_;
};

}  // namespace fulmen
