#include "driver/build_program.h"

#include "driver/revocation.h"
#include "ir/print.h"
#include "passes/alias_views.h"
#include "passes/plan_memory.h"

namespace fulmen {
namespace {

const std::shared_ptr<const Executor>* find_executor(const ExecutorList& executors, std::string_view name) {
  for (const auto& executor : executors)
    if (executor->name() == name) return &executor;
  return nullptr;
}

}  // namespace

Program build_program(const Trace& trace, const ExecutorList& executors, const Target& target) {
  std::vector<std::shared_ptr<const Kernel>> kernels(trace.nodes.size());
  std::vector<size_t> workspace_bytes(trace.nodes.size(), 0);
  for (size_t i = 0; i < trace.nodes.size(); ++i) {
    const Node& node = trace.nodes[i];
    if (node.executor == view_executor) continue;
    const auto* executor = find_executor(executors, node.executor);
    FULMEN_CHECK(executor && node.plan);
    kernels[i] = make_revocable_kernel(trace, node, *executor, executors, target);
    workspace_bytes[i] = kernels[i]->workspace_bytes();
  }
  MemoryPlan memory = plan_memory(trace, workspace_bytes);
  std::vector<Instruction> instructions;
  for (size_t i = 0; i < trace.nodes.size(); ++i) {
    if (!kernels[i]) continue;
    const Node& node = trace.nodes[i];
    instructions.push_back({std::move(kernels[i]), {node.inputs.begin(), node.inputs.end()}, {node.outputs.begin(), node.outputs.end()},
                            memory.workspace_offsets[i], node.executor, node.op->name, to_string(trace, node)});
  }
  std::vector<TensorType> inputs, outputs;
  for (ValueId id : trace.inputs) inputs.push_back(trace.type(id));
  for (ValueId id : trace.outputs) outputs.push_back(id == no_value ? TensorType{} : trace.type(id));
  return Program(std::move(inputs), std::move(outputs), std::move(memory.slots), std::move(instructions), memory.arena_bytes);
}

}  // namespace fulmen
