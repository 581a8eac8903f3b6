// One C++ body for both directions of a torch.autograd.Function. Its class is made in Python (python/fulmen/_autograd.py)
// with `forward` and, on the class of its contexts, `apply` replaced by the two C functions here, so that neither
// direction runs Python code: the forward is handed to the class's own `apply` through a pending call, what it keeps goes
// into a slot of the context, and tensors into the context's saved tensors, which count versions and obey hooks.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>

#include "compiled.h"

namespace fulmen::python {

namespace nb = nanobind;

// What a forward leaves in its context.
class BackwardState {
 public:
  virtual ~BackwardState() = default;
  // A new tuple: a gradient or None for each argument of apply. `saved` is the context's tuple of saved tensors.
  virtual PyObject* backward(PyObject* saved, PyObject* const* grads, Py_ssize_t count) = 0;
};

// A forward on its way through apply: made on the caller's stack, run by it.
class PendingForward {
 public:
  struct Result {
    PyObject* outputs = nullptr;  // new: a tensor, or a tuple of tensors
    PyObject* saved = nullptr;    // new: a tuple of tensors
    std::unique_ptr<BackwardState> state;
    PyObject* not_differentiable = nullptr;  // new: a tuple of outputs, or null
    bool missing_grads_are_none = false;
  };
  virtual Result run() = 0;

  // Calls `function`.apply(operands...), which calls run(). A new reference; throws what went wrong.
  PyObject* apply(PyObject* function, PyObject* const* operands, size_t count);

 protected:
  ~PendingForward() = default;
};

}  // namespace fulmen::python
