// A compiled trace as Python holds it: runs forward and backward on tensors of any DLPack framework. Guards (dtype,
// shape, device) are checked on every call; a tensor laid out in another way than the program expects is copied.
// Compiling is in compile.cpp, attention's own fast entry in sdpa.cpp.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <span>
#include <vector>

#include "dlpack.h"
#include "driver/compile.h"

namespace fulmen::python {

namespace nb = nanobind;

// What a forward leaves for its backward: saved values in one block, and the inputs that the backward reads.
struct Saved {
  std::shared_ptr<const CompiledTrace> trace;
  PoolBuffer host;
  DeviceMemory device;
  std::vector<nb::object> inputs;  // of backward_saved_inputs, then shared results; empty if the caller keeps them
  bool released = false;

  char* data() const { return static_cast<char*>(host.data() ? host.data() : device.data()); }
  void release();  // gives the memory back; a later backward is an error
};

class Compiled {
 public:
  struct Results {
    std::vector<nb::object> outputs;
    std::unique_ptr<Saved> saved;  // only of a training program
  };

  Compiled(std::shared_ptr<const CompiledTrace> trace, Target target);

  const CompiledTrace& trace() const { return *trace_; }
  const Target& target() const { return target_; }
  size_t saved_buffer_bytes() const { return saved_bytes_; }
  const std::vector<int>& saved_outputs() const { return saved_outputs_; }

  // `inputs` are tensors, or Python numbers where the program takes a 0-dim value.
  Results forward(std::span<PyObject* const> inputs, bool keep_inputs) const;

  // For callers that know that the views fit: no guard is checked.
  Results forward_unchecked(const Framework& framework, std::span<const TensorView> views, std::span<PyObject* const> objects,
                            bool keep_inputs) const;

  // `output_grads` has one entry for each output of the trace, None where no gradient arrives. `inputs` are those of
  // backward_saved_inputs, then the results that the backward reads (saved_outputs), where the forward was told not to
  // keep them. The result has one entry a trace input.
  // With `program`, that one runs: a backward of the same trace for other layouts of the gradients.
  std::vector<nb::object> backward(const Saved& saved, std::span<PyObject* const> output_grads,
                                   std::span<PyObject* const> inputs, const Program* program = nullptr) const;

 private:
  struct Arguments;
  void run(const Program& program, const Framework& framework, const void* const* inputs, void* const* outputs) const;
  Results run_forward(const Framework& framework, const void* const* inputs, std::span<PyObject* const> objects,
                      bool keep_inputs) const;

  std::shared_ptr<const CompiledTrace> trace_;
  Target target_;
  std::vector<size_t> saved_offsets_;
  std::vector<int> saved_outputs_;  // trace outputs that the backward reads and the forward doesn't write twice
  size_t saved_bytes_ = 0;
};

// compile() of src/driver, without the GIL. An InternalError leaves the trace in a file that `fulmen run` replays, and
// names it.
std::shared_ptr<const CompiledTrace> compile_trace(const Trace& trace, const CompileOptions& options);

// What all programs report their times to while it is set; null otherwise.
void set_active_profile(Profile* profile);

// A new tuple that takes the objects; null ones become None.
PyObject* tuple_of(std::vector<nb::object>& objects);

// The items of a Python list or tuple; TypeError that names `what` for anything else.
std::span<PyObject* const> items_of(nb::handle sequence, const char* what);

}  // namespace fulmen::python
