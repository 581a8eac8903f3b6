#include "autograd.h"

#include <array>
#include <utility>
#include <vector>

#include "bindings.h"
#include "core/error.h"
#include "python_error.h"
#include "torch_state.h"

namespace fulmen::python {
namespace {

thread_local PendingForward* pending = nullptr;

struct StateObject {
  PyObject_HEAD
  BackwardState* state;
};

struct Names {
  PyObject *apply, *state, *to_save, *saved_tensors, *non_differentiable, *materialize_grads, *watched;
};
Names names{};
PyTypeObject* state_type = nullptr;

void state_dealloc(PyObject* self) {
  delete reinterpret_cast<StateObject*>(self)->state;
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

void set_attribute(PyObject* object, PyObject* name, PyObject* value) {
  if (PyObject_SetAttr(object, name, value) != 0) throw PythonError();
}

// forward(context, operands...)
PyObject* forward(PyObject*, PyObject* const* args, Py_ssize_t count) {
  PendingForward* call = std::exchange(pending, nullptr);
  try {
    if (!call || count < 1) throw InternalError("internal: a forward of fulmen was called by something else than its own call");
    PendingForward::Result result = call->run();
    nb::object outputs = nb::steal(result.outputs), saved = nb::steal(result.saved), fixed = nb::steal(result.not_differentiable);
    set_attribute(args[0], names.to_save, saved.ptr());
    if (fixed) set_attribute(args[0], names.non_differentiable, fixed.ptr());
    if (result.missing_grads_are_none) set_attribute(args[0], names.materialize_grads, Py_False);
    PyObject* object = state_type->tp_alloc(state_type, 0);
    if (!object) throw PythonError();
    reinterpret_cast<StateObject*>(object)->state = result.state.release();
    const nb::object holder = nb::steal(object);
    set_attribute(args[0], names.state, object);
    return outputs.release().ptr();
  } catch (...) {
    return raise_python();
  }
}

// The context's apply(grads...), which autograd calls.
PyObject* backward(PyObject* self, PyObject* const* grads, Py_ssize_t count) {
  try {
    const nb::object holder = nb::steal(PyObject_GetAttr(self, names.state));
    if (!holder) throw PythonError();
    if (!Py_IS_TYPE(holder.ptr(), state_type)) throw InternalError("internal: a context of fulmen without its state");
    const nb::object saved = nb::steal(PyObject_GetAttr(self, names.saved_tensors));
    if (!saved) throw PythonError();
    nb::object result = nb::steal(reinterpret_cast<StateObject*>(holder.ptr())->state->backward(saved.ptr(), grads, count));
    if (!torch_state().grad_enabled()) return result.release().ptr();
    // create_graph=True: the gradients are numbers; differentiating them again is an error that says so.
    nb::object incoming = nb::steal(PyTuple_New(count));
    if (!incoming) throw PythonError();
    for (Py_ssize_t i = 0; i < count; ++i) PyTuple_SET_ITEM(incoming.ptr(), i, Py_NewRef(grads[i]));
    PyObject* watched = PyObject_CallMethodObjArgs(self, names.watched, result.ptr(), saved.ptr(), incoming.ptr(), nullptr);
    if (!watched) throw PythonError();
    return watched;
  } catch (...) {
    return raise_python();
  }
}

PyMethodDef forward_method{"forward", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(forward)), METH_FASTCALL,
                           "The forward of a torch.autograd.Function of fulmen"};
PyMethodDef backward_method{"apply", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(backward)), METH_FASTCALL,
                            "The backward of a torch.autograd.Function of fulmen"};

}  // namespace

PyObject* PendingForward::apply(PyObject* function, PyObject* const* operands, size_t count) {
  PendingForward* const before = std::exchange(pending, this);
  std::array<PyObject*, 17> few;
  std::vector<PyObject*> many;
  PyObject** args = few.data();
  if (count + 1 > few.size()) {
    many.resize(count + 1);
    args = many.data();
  }
  args[0] = function;
  for (size_t i = 0; i < count; ++i) args[i + 1] = operands[i];
  PyObject* outputs = PyObject_VectorcallMethod(names.apply, args, count + 1, nullptr);
  pending = before;
  if (!outputs) throw PythonError();
  return outputs;
}

void bind_autograd(nb::module_& m) {
  names = {PyUnicode_InternFromString("apply"),         PyUnicode_InternFromString("state"),
           PyUnicode_InternFromString("to_save"),       PyUnicode_InternFromString("saved_tensors"),
           PyUnicode_InternFromString("non_differentiable"), PyUnicode_InternFromString("materialize_grads"),
           PyUnicode_InternFromString("watched")};
  static PyType_Slot slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(state_dealloc)}, {0, nullptr}};
  static PyType_Spec spec{"fulmen._core.BackwardState", sizeof(StateObject), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
  state_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  if (!state_type) throw PythonError();
  PyObject* made = PyCFunction_NewEx(&forward_method, nullptr, nullptr);
  if (!made) throw PythonError();
  m.attr("autograd_forward") = nb::steal(made);
  // Gives a class of contexts the C backward as its method `apply`.
  m.def("use_autograd_backward", [](nb::handle context_class) {
    if (!PyType_Check(context_class.ptr())) throw TypeError("use_autograd_backward: a class is needed");
    nb::object method = nb::steal(PyDescr_NewMethod(reinterpret_cast<PyTypeObject*>(context_class.ptr()), &backward_method));
    if (!method) throw PythonError();
    context_class.attr("apply") = method;
  });
}

}  // namespace fulmen::python
