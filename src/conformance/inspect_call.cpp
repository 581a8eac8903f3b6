#include "conformance/inspect_call.h"

#include <exception>
#include <thread>

#include "conformance/strided_memory.h"
#include "core/error.h"
#include "ir/print.h"

namespace fulmen::conformance {
namespace {

// Operands and results of one run, each in memory of its own.
struct Memory {
  std::vector<StridedMemory> inputs, outputs;
  std::vector<const void*> input_data;
  std::vector<void*> output_data;
  std::string error;

  Memory(const Call& call, const std::vector<const HostTensor*>& values) {
    for (size_t i = 0; i < call.inputs.size(); ++i)
      if (call.inputs[i]) inputs.emplace_back(*call.inputs[i], values[i]);
    for (const TensorType* type : call.outputs)
      if (type) outputs.emplace_back(*type, nullptr);
    size_t next = 0;
    for (const TensorType* type : call.inputs) input_data.push_back(type ? inputs[next++].data() : nullptr);
    next = 0;
    for (const TensorType* type : call.outputs) output_data.push_back(type ? outputs[next++].data() : nullptr);
  }

  void run(const Kernel& kernel) {
    try {
      std::vector<unsigned char> workspace(kernel.workspace_bytes() + 64);
      RunContext context;
      context.workspace = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(workspace.data()) + 63) / 64 * 64);
      kernel.run(context, input_data.data(), output_data.data());
    } catch (const std::exception& caught) {
      error = caught.what();
    }
  }
};

std::string one_line(const std::string& text) { return text.substr(0, text.find('\n')); }

}  // namespace

void CallInspector::fault(const std::string& promise, const std::string& text) {
  report_.faults.push_back({promise, call_, text, to_string(program_)});
}

std::optional<Claim> CallInspector::answer(const Call& call) {
  try {
    return executor_.claim(call, target_);
  } catch (const std::exception& caught) {
    fault("claim", "asking it raised " + one_line(caught.what()));
    return std::nullopt;
  }
}

std::optional<Plan> CallInspector::ask(const Call& call) {
  const std::optional<Claim> claim = answer(call);
  if (!claim) return std::nullopt;
  const std::optional<Claim> again = answer(call);
  if (again && is_claimed(*again) != is_claimed(*claim)) fault("claim", "asked twice it answers differently");
  if (const auto* refusal = std::get_if<Refusal>(&*claim)) {
    const std::string& reason = refusal->reason;
    const std::string family = call.op->name.starts_with("sdpa") ? "sdpa" : call.op->name;
    if (!reason.starts_with(family + ": ") && !reason.starts_with(call.op->name + ": "))
      fault("refusal", "its sentence is '" + one_line(reason) + "'; one that starts with '" + family + ": ' is needed");
    else if (reason.size() < family.size() + 6 || reason.find('\n') != std::string::npos)
      fault("refusal", "its sentence is '" + one_line(reason) + "'; one line with what was found and what is needed is needed");
    return std::nullopt;
  }
  const Plan& plan = std::get<Plan>(*claim);
  if (plan.forward.kernel.empty()) fault("claim", "its plan doesn't name the kernel");
  if (call.training && !plan.backward) fault("claim", "it claims the call for training, and its plan has no backward");
  Call strict = call;
  strict.deterministic = true;
  if (const std::optional<Claim> careful = answer(strict); careful && is_claimed(*careful) && !std::get<Plan>(*careful).deterministic)
    fault("claim", "asked for deterministic results it claims the call with a plan that says it isn't deterministic");
  return plan;
}

std::optional<std::vector<HostTensor>> CallInspector::run(const Call& call, const Plan& plan, const std::vector<const HostTensor*>& values) {
  std::unique_ptr<Kernel> kernel;
  try {
    kernel = executor_.make_kernel(call, plan, target_);
  } catch (const std::exception& caught) {
    fault("run", "making its kernel raised " + one_line(caught.what()));
    return std::nullopt;
  }
  Memory here(call, values), there(call, values);
  std::thread other([&] { there.run(*kernel); });
  here.run(*kernel);
  other.join();
  for (const Memory* memory : {&here, &there})
    if (!memory->error.empty()) {
      fault("run", std::string(memory == &here ? "" : "on another thread ") + "its kernel raised " + one_line(memory->error));
      return std::nullopt;
    }
  for (size_t i = 0; i < here.outputs.size(); ++i)
    if (!here.outputs[i].canaries_intact() || !there.outputs[i].canaries_intact()) fault("memory", "bytes beside result " + std::to_string(i) + " were written");
  for (size_t i = 0; i < here.inputs.size(); ++i)
    if (!here.inputs[i].unchanged() || !there.inputs[i].unchanged()) fault("inputs", "operand " + std::to_string(i) + " was written");
  if (plan.deterministic)
    for (size_t i = 0; i < here.outputs.size(); ++i)
      if (!here.outputs[i].equals(there.outputs[i])) {
        fault("repeat", "result " + std::to_string(i) + " has other bits the second time");
        break;
      }
  std::vector<HostTensor> results;
  size_t next = 0;
  for (const TensorType* type : call.outputs) results.push_back(type ? here.outputs[next++].read() : HostTensor{});
  return results;
}

}  // namespace fulmen::conformance
