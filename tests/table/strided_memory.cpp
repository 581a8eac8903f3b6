#include "tests/table/strided_memory.h"

#include <gtest/gtest.h>

namespace fulmen::table {

bool run_call(const Executor& executor, const Trace& trace, const Target& target, std::vector<StridedMemory>& inputs,
              std::vector<StridedMemory>& outputs) {
  const Node& node = trace.nodes[0];
  Call call;
  call.op = static_cast<const OpDef*>(node.op);
  call.attrs = &node.attrs;
  call.body = node.body.get();
  std::vector<const void*> input_data;
  std::vector<void*> output_data;
  size_t next = 0;
  for (ValueId id : node.inputs) {
    call.inputs.push_back(id == no_value ? nullptr : &trace.type(id));
    input_data.push_back(id == no_value ? nullptr : inputs[next++].data());
  }
  next = 0;
  for (ValueId id : node.outputs) {
    call.outputs.push_back(id == no_value ? nullptr : &trace.type(id));
    output_data.push_back(id == no_value ? nullptr : outputs[next++].data());
  }
  const Claim claim = executor.claim(call, target);
  if (const auto* refusal = std::get_if<Refusal>(&claim)) {
    ADD_FAILURE() << refusal->reason;
    return false;
  }
  const Plan& plan = std::get<Plan>(claim);
  const auto kernel = executor.make_kernel(call, plan, target);
  std::vector<unsigned char> workspace(kernel->workspace_bytes() + 64);
  RunContext context;
  context.workspace = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(workspace.data()) + 63) / 64 * 64);
  kernel->run(context, input_data.data(), output_data.data());
  return true;
}

}  // namespace fulmen::table
