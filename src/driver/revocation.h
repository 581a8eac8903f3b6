// What happens when a claimed kernel fails at run time: the claim is revoked for that call, the next executor in the
// list (or the op's decomposition) runs it, the result is right, and one warning names the fault.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "executors/executor.h"

namespace fulmen {

// A kernel of `executor` for the node, which replaces itself by the next executor's when it throws DeviceError.
// If its making fails that way, the replacement is made at once.
std::shared_ptr<const Kernel> make_revocable_kernel(const Trace& trace, const Node& node, const std::shared_ptr<const Executor>& executor,
                                                    const ExecutorList& executors, const Target& target);

// Where warnings go; the default is stderr. Python sends them to its warnings module. Thread-safe.
void set_warning_handler(std::function<void(const std::string&)> handler);
void warn(const std::string& message);

// How many claims were revoked in this process.
int revocation_count();

}  // namespace fulmen
