// A kernel: made once for a call (types, strides and attributes are fixed then), run many times.
#pragma once

#include <cstddef>

namespace fulmen {

struct RunContext {
  void* stream = nullptr;          // the device's stream, as the framework gives it; unused on the CPU
  int device_index = 0;
  void* workspace = nullptr;       // workspace_bytes() bytes, 64-byte aligned, not initialised
};

class Kernel {
 public:
  virtual ~Kernel() = default;
  virtual size_t workspace_bytes() const { return 0; }
  // inputs[i] and outputs[i] are null where the operand or result is absent. Memory is laid out as the types that the
  // kernel was made for say. Outputs never overlap inputs, unless aliasing was agreed on. Thread-safe: a kernel has no
  // state that changes. Throws DeviceError if the device fails.
  virtual void run(const RunContext& context, const void* const* inputs, void* const* outputs) const = 0;
};

}  // namespace fulmen
