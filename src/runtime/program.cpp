#include "runtime/program.h"

#include <chrono>

#include "core/error.h"

namespace fulmen {

Program::Program(std::vector<TensorType> inputs, std::vector<TensorType> outputs, std::vector<Slot> slots,
                 std::vector<Instruction> instructions, size_t arena_bytes)
    : inputs_(std::move(inputs)),
      outputs_(std::move(outputs)),
      slots_(std::move(slots)),
      instructions_(std::move(instructions)),
      arena_bytes_(arena_bytes) {}

void Program::run(const RunContext& context, const void* const* inputs, void* const* outputs, void* arena,
                  std::vector<double>* milliseconds) const {
  // Addresses of all slots. Kernels may run programs themselves (a revoked call's replacement), so this is no
  // thread-wide scratch.
  std::vector<void*> address(slots_.size(), nullptr);
  for (size_t i = 0; i < slots_.size(); ++i) {
    const Slot& slot = slots_[i];
    char* base = nullptr;
    switch (slot.storage) {
      case Storage::none: continue;
      case Storage::input: base = static_cast<char*>(const_cast<void*>(inputs[slot.index])); break;
      case Storage::output: base = static_cast<char*>(outputs[slot.index]); break;
      case Storage::arena: base = static_cast<char*>(arena); break;
    }
    address[i] = base ? base + slot.byte_offset : nullptr;
  }
  if (milliseconds) milliseconds->assign(instructions_.size(), 0.0);
  RunContext local = context;
  std::vector<void*> operands;
  for (size_t n = 0; n < instructions_.size(); ++n) {
    const Instruction& instruction = instructions_[n];
    const size_t count = instruction.inputs.size() + instruction.outputs.size();
    if (operands.size() < count) operands.resize(count);
    size_t k = 0;
    for (int slot : instruction.inputs) operands[k++] = slot < 0 ? nullptr : address[static_cast<size_t>(slot)];
    for (int slot : instruction.outputs) operands[k++] = slot < 0 ? nullptr : address[static_cast<size_t>(slot)];
    local.workspace = static_cast<char*>(arena) + instruction.workspace_offset;
    const auto start = milliseconds ? std::chrono::steady_clock::now() : std::chrono::steady_clock::time_point();
    instruction.kernel->run(local, operands.data(), operands.data() + instruction.inputs.size());
    if (milliseconds)
      (*milliseconds)[n] = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
  }
}

}  // namespace fulmen
