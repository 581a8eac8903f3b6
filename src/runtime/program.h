// A program: flat instructions with resolved kernels and a memory plan. Running it allocates nothing: the caller brings
// the outputs' memory and one arena.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/tensor_type.h"
#include "runtime/kernel.h"

namespace fulmen {

class Profile;

// Where a value's memory is while the program runs.
enum class Storage : uint8_t { none, input, output, arena };
struct Slot {
  Storage storage = Storage::none;
  int index = 0;            // of the input or output
  int64_t byte_offset = 0;  // into the arena, or from the input's or output's start (views)
};

struct Instruction {
  std::shared_ptr<const Kernel> kernel;
  std::vector<int> inputs, outputs;  // slots; -1 where absent
  int64_t workspace_offset = 0;      // into the arena
  std::string executor, op, text;    // for profiles and messages
};

class Program {
 public:
  Program() = default;
  Program(std::vector<TensorType> inputs, std::vector<TensorType> outputs, std::vector<Slot> slots,
          std::vector<Instruction> instructions, size_t arena_bytes);

  const std::vector<TensorType>& inputs() const { return inputs_; }
  const std::vector<TensorType>& outputs() const { return outputs_; }
  const std::vector<Instruction>& instructions() const { return instructions_; }
  size_t arena_bytes() const { return arena_bytes_; }  // 64-byte aligned memory the caller brings

  // Thread-safe. `profile`, if given, gets the time of each instruction.
  void run(const RunContext& context, const void* const* inputs, void* const* outputs, void* arena, Profile* profile = nullptr) const;

 private:
  std::vector<TensorType> inputs_, outputs_;
  std::vector<Slot> slots_;
  std::vector<Instruction> instructions_;
  size_t arena_bytes_ = 0;
};

}  // namespace fulmen
