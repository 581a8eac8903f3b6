#include "torch_state.h"

#include "python_error.h"

namespace fulmen::python {
namespace {

PyObject* attribute_of(const char* module_name, const char* name, bool needed) {
  PyObject* module = PyImport_ImportModule(module_name);
  PyObject* found = module ? PyObject_GetAttrString(module, name) : nullptr;
  Py_XDECREF(module);
  if (!found) {
    if (needed) throw PythonError();
    PyErr_Clear();
  }
  return found;
}

}  // namespace

void TorchState::Question::load(const char* module, const char* name, bool otherwise) {
  function_ = attribute_of(module, name, false);
  otherwise_ = otherwise;
  if (function_ && PyCFunction_Check(function_) && PyCFunction_GET_FLAGS(function_) == METH_NOARGS)
    direct_ = PyCFunction_GET_FUNCTION(function_);
}

bool TorchState::Question::yes() const {
  if (!function_) return otherwise_;
  PyObject* answer = direct_ ? direct_(PyCFunction_GET_SELF(function_), nullptr) : PyObject_CallNoArgs(function_);
  if (!answer) throw PythonError();
  const bool yes = answer != Py_False;
  Py_DECREF(answer);
  return yes;
}

void TorchState::load() {
  if (loaded()) return;
  parameter_type_ = attribute_of("torch.nn", "Parameter", true);
  requires_grad_name_ = PyUnicode_InternFromString("requires_grad");
  grad_enabled_.load("torch", "is_grad_enabled", true);
  autocast_.load("torch._C", "_is_any_autocast_enabled", true);
  transforms_.load("torch._C", "_are_functorch_transforms_active", true);
  deterministic_.load("torch._C", "_get_deterministic_algorithms", true);
  keeps_graph_.load("torch._C._autograd", "_get_current_graph_task_keep_graph", true);
  if (PyObject* module = PyImport_ImportModule("torch.autograd.forward_ad")) {
    forward_level_dict_ = PyModule_GetDict(module);
    Py_XINCREF(forward_level_dict_);
    Py_DECREF(module);
    forward_level_name_ = PyUnicode_InternFromString("_current_level");
  }
  PyErr_Clear();
  PyObject* type = attribute_of("torch", "Tensor", true);
  PyObject* descriptor = PyObject_GetAttr(type, requires_grad_name_);
  if (!descriptor) throw PythonError();
  if (Py_IS_TYPE(descriptor, &PyGetSetDescr_Type)) {
    const PyGetSetDef* definition = reinterpret_cast<PyGetSetDescrObject*>(descriptor)->d_getset;
    requires_grad_getter_ = definition->get;
    requires_grad_closure_ = definition->closure;
  }
  Py_DECREF(descriptor);
  tensor_type_ = type;
}

bool TorchState::requires_grad(PyObject* tensor) const {
  PyObject* answer =
      requires_grad_getter_ ? requires_grad_getter_(tensor, requires_grad_closure_) : PyObject_GetAttr(tensor, requires_grad_name_);
  if (!answer) throw PythonError();
  const bool yes = answer != Py_False;
  Py_DECREF(answer);
  return yes;
}

bool TorchState::is_transformed() const {
  if (autocast_.yes() || transforms_.yes()) return true;
  PyObject* level = forward_level_dict_ ? PyDict_GetItemWithError(forward_level_dict_, forward_level_name_) : nullptr;
  if (!level) {
    if (PyErr_Occurred()) throw PythonError();
    return true;  // unknown: the general path looks closer
  }
  const long value = PyLong_AsLong(level);
  if (value == -1 && PyErr_Occurred()) throw PythonError();
  return value >= 0;
}

TorchState& torch_state() {
  static TorchState* instance = new TorchState();
  return *instance;
}

}  // namespace fulmen::python
