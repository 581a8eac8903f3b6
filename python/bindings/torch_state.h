// What calls ask PyTorch about itself, without its headers: is a gradient wanted, is autocast on, does a transform of
// torch.func or forward-mode differentiation watch, is the graph of this backward kept. Each answer is one C call to the
// function that Python would call. Loaded when python/fulmen/_attention.py is imported; used by sdpa.cpp and autograd.cpp.
#pragma once

#include <Python.h>

namespace fulmen::python {

class TorchState {
 public:
  // Looks PyTorch's functions up; an exception of Python if one is missing that has to be there.
  void load();
  bool loaded() const { return tensor_type_ != nullptr; }

  // A torch.Tensor or torch.nn.Parameter itself, no subclass: nothing about it is overridden.
  bool is_plain(PyObject* object) const {
    PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(object));
    return type == tensor_type_ || type == parameter_type_;
  }
  bool requires_grad(PyObject* tensor) const;  // of a plain tensor
  bool grad_enabled() const { return grad_enabled_.yes(); }
  // Something that changes what a call means: autocast, a transform of torch.func, forward-mode differentiation.
  bool is_transformed() const;
  bool deterministic() const { return deterministic_.yes(); }
  bool keeps_graph() const { return keeps_graph_.yes(); }  // of the backward that runs now

 private:
  // A function without arguments that answers with a bool.
  class Question {
   public:
    void load(const char* module, const char* name, bool otherwise);
    bool yes() const;

   private:
    PyObject* function_ = nullptr;
    PyCFunction direct_ = nullptr;  // the function's own code, where it has no arguments to parse
    bool otherwise_ = false;        // where this PyTorch has no such function
  };

  PyObject* tensor_type_ = nullptr;
  PyObject* parameter_type_ = nullptr;
  PyObject* requires_grad_name_ = nullptr;
  getter requires_grad_getter_ = nullptr;
  void* requires_grad_closure_ = nullptr;
  PyObject* forward_level_dict_ = nullptr;  // of torch.autograd.forward_ad
  PyObject* forward_level_name_ = nullptr;
  Question grad_enabled_, autocast_, transforms_, deterministic_, keeps_graph_;
};

// The process's; needs the GIL. References are kept for good: types and functions of PyTorch outlive every call.
TorchState& torch_state();

}  // namespace fulmen::python
