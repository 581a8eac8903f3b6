// One call of one executor under inspection: what it answers, and what its kernel does to memory.
#pragma once

#include <optional>
#include <vector>

#include "conformance/check_executor.h"

namespace fulmen::conformance {

class CallInspector {
 public:
  // Faults are added to `report` under `call`, a name for people, with the text of `program`.
  CallInspector(const Executor& executor, const Target& target, Report& report, std::string call, const Trace& program)
      : executor_(executor), target_(target), report_(report), call_(std::move(call)), program_(program) {}

  // The plan if it claims the call; refusals and claims are held against their promises.
  std::optional<Plan> ask(const Call& call);

  // Runs a claimed call twice, once on another thread. values[i] belongs to operand i (null where absent). Gives one
  // tensor a result (empty where it isn't wanted), or nothing if it could not run.
  std::optional<std::vector<HostTensor>> run(const Call& call, const Plan& plan, const std::vector<const HostTensor*>& values);

  void fault(const std::string& promise, const std::string& text);

 private:
  std::optional<Claim> answer(const Call& call);

  const Executor& executor_;
  const Target& target_;
  Report& report_;
  std::string call_;
  const Trace& program_;
};

}  // namespace fulmen::conformance
