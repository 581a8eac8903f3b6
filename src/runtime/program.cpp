#include "runtime/program.h"

#include <chrono>

#include "core/error.h"
#include "runtime/profile.h"

namespace fulmen {

Program::Program(std::vector<TensorType> inputs, std::vector<TensorType> outputs, std::vector<Slot> slots,
                 std::vector<Instruction> instructions, size_t arena_bytes)
    : inputs_(std::move(inputs)),
      outputs_(std::move(outputs)),
      slots_(std::move(slots)),
      instructions_(std::move(instructions)),
      arena_bytes_(arena_bytes) {}

void Program::run(const RunContext& context, const void* const* inputs, void* const* outputs, void* arena, Profile* profile) const {
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
  RunContext local = context;
  std::vector<void*> operands;
  for (const Instruction& instruction : instructions_) {
    const size_t count = instruction.inputs.size() + instruction.outputs.size();
    if (operands.size() < count) operands.resize(count);
    size_t k = 0;
    for (int slot : instruction.inputs) operands[k++] = slot < 0 ? nullptr : address[static_cast<size_t>(slot)];
    for (int slot : instruction.outputs) operands[k++] = slot < 0 ? nullptr : address[static_cast<size_t>(slot)];
    local.workspace = static_cast<char*>(arena) + instruction.workspace_offset;
    if (!profile) {
      instruction.kernel->run(local, operands.data(), operands.data() + instruction.inputs.size());
      continue;
    }
    const auto start = std::chrono::steady_clock::now();
    instruction.kernel->run(local, operands.data(), operands.data() + instruction.inputs.size());
    const std::chrono::duration<double, std::milli> elapsed = std::chrono::steady_clock::now() - start;
    profile->add(instruction.executor, instruction.op, instruction.text, elapsed.count());
  }
}

}  // namespace fulmen
