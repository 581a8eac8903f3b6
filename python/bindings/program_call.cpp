// A compiled graph as Dynamo's generated code calls it: tensors in, a tuple of tensors out, gradients recorded, no Python
// code on the way. Graphs that change their inputs or rearrange results, and calls under hooks on saved tensors, are run by
// python/fulmen/torch_backend/bridge.py.
#include <nanobind/stl/vector.h>

#include "autograd.h"
#include "bindings.h"
#include "core/error.h"
#include "python_error.h"
#include "torch_state.h"

namespace fulmen::python {
namespace {

struct ProgramCall {
  nb::object owner;  // of `compiled`
  const Compiled* compiled = nullptr;
  nb::object function;  // the torch.autograd.Function
  nb::object careful;   // runs calls under hooks on saved tensors
  nb::object seed;      // a function that draws one, or None
  nb::object hooks;     // a function: the hooks on saved tensors that are active, or None
  std::vector<int> places;      // program input i is argument places[i]
  std::vector<nb::object> constants;
  std::vector<int> grad_places;  // program inputs that gradients are made for
  std::vector<int> fixed;        // results that no gradient arrives for
  std::vector<int> order;        // result i is output order[i] of the program

  PyObject* call(PyObject* const* args, Py_ssize_t count) const;
};

class ProgramBackward : public BackwardState {
 public:
  ProgramBackward(const ProgramCall& program, std::unique_ptr<Saved> saved)
      : owner_(program.owner), compiled_(program.compiled), grad_places_(program.grad_places), saved_(std::move(saved)) {}

  PyObject* backward(PyObject* tensors, PyObject* const* grads, Py_ssize_t count) override {
    std::vector<nb::object> results = compiled_->backward(*saved_, {grads, static_cast<size_t>(count)}, items_of(tensors, "saved tensors"));
    if (!torch_state().keeps_graph()) saved_->release();
    std::vector<nb::object> made;
    made.reserve(grad_places_.size());
    for (int place : grad_places_) made.push_back(std::move(results[static_cast<size_t>(place)]));
    return tuple_of(made);
  }

 private:
  nb::object owner_;
  const Compiled* compiled_;
  std::vector<int> grad_places_;
  std::unique_ptr<Saved> saved_;
};

class ProgramForward : public PendingForward {
 public:
  ProgramForward(const ProgramCall& program, std::span<PyObject* const> inputs) : program_(program), inputs_(inputs) {}

  Result run() override {
    const Compiled& compiled = *program_.compiled;
    Compiled::Results made = compiled.forward(inputs_, false);
    Result result;
    const std::vector<int>& kept = compiled.trace().backward_saved_inputs;
    result.saved = PyTuple_New(static_cast<Py_ssize_t>(kept.size()));
    if (!result.saved) throw PythonError();
    for (size_t i = 0; i < kept.size(); ++i)
      PyTuple_SET_ITEM(result.saved, static_cast<Py_ssize_t>(i), Py_NewRef(inputs_[static_cast<size_t>(kept[i])]));
    if (!program_.fixed.empty()) {
      std::vector<nb::object> fixed;
      for (int place : program_.fixed) fixed.push_back(made.outputs[static_cast<size_t>(place)]);
      result.not_differentiable = tuple_of(fixed);
    }
    result.missing_grads_are_none = true;
    result.state = std::make_unique<ProgramBackward>(program_, std::move(made.saved));
    result.outputs = tuple_of(made.outputs);
    return result;
  }

 private:
  const ProgramCall& program_;
  std::span<PyObject* const> inputs_;
};

PyObject* ProgramCall::call(PyObject* const* args, Py_ssize_t count) const {
  const bool recorded = compiled->trace().backward && torch_state().grad_enabled();
  if (recorded && !hooks(true).is_none()) return PyObject_Vectorcall(careful.ptr(), args, static_cast<size_t>(count), nullptr);
  std::vector<PyObject*> inputs;
  inputs.reserve(places.size() + constants.size() + 1);
  for (int place : places) {
    if (place >= count) throw ShapeError("compiled graph: " + std::to_string(count) + " arguments given, at least " + std::to_string(place + 1) + " are needed");
    inputs.push_back(args[place]);
  }
  for (const nb::object& constant : constants) inputs.push_back(constant.ptr());
  nb::object drawn;
  if (!seed.is_none()) {
    drawn = seed();
    inputs.push_back(drawn.ptr());
  }
  nb::object outputs;
  if (recorded) {
    std::vector<PyObject*> with_grad;
    with_grad.reserve(grad_places.size());
    for (int place : grad_places) with_grad.push_back(inputs[static_cast<size_t>(place)]);
    outputs = nb::steal(ProgramForward(*this, inputs).apply(function.ptr(), with_grad.data(), with_grad.size()));
  } else {
    Compiled::Results made = compiled->forward(inputs, false);
    outputs = nb::steal(tuple_of(made.outputs));
  }
  if (order.empty()) return outputs.release().ptr();
  PyObject* chosen = PyTuple_New(static_cast<Py_ssize_t>(order.size()));
  if (!chosen) throw PythonError();
  for (size_t i = 0; i < order.size(); ++i)
    PyTuple_SET_ITEM(chosen, static_cast<Py_ssize_t>(i), Py_NewRef(PyTuple_GET_ITEM(outputs.ptr(), order[i])));
  return chosen;
}

PyObject* call_program(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  try {
    return nb::cast<const ProgramCall&>(nb::handle(self)).call(args, count);
  } catch (...) {
    return raise_python();
  }
}

PyMethodDef call_method{"compiled_graph", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(call_program)), METH_FASTCALL,
                        "A graph compiled by fulmen"};

}  // namespace

void bind_program_call(nb::module_& m) {
  nb::class_<ProgramCall>(m, "ProgramCall");
  m.def(
      "program_call",
      [](nb::object compiled, nb::object function, nb::object careful, nb::object seed, nb::object hooks, std::vector<int> places,
         nb::list constants, std::vector<int> grad_places, std::vector<int> fixed, std::vector<int> order) {
        torch_state().load();
        auto program = std::make_unique<ProgramCall>();
        program->compiled = &nb::cast<const Compiled&>(compiled);
        program->owner = std::move(compiled);
        program->function = std::move(function);
        program->careful = std::move(careful);
        program->seed = std::move(seed);
        program->hooks = std::move(hooks);
        program->places = std::move(places);
        for (nb::handle constant : constants) program->constants.push_back(nb::borrow(constant));
        program->grad_places = std::move(grad_places);
        program->fixed = std::move(fixed);
        const size_t outputs = static_cast<size_t>(program->compiled->trace().output_count);
        bool in_order = order.size() == outputs;
        for (size_t i = 0; i < order.size(); ++i) {
          if (order[i] < 0 || static_cast<size_t>(order[i]) >= outputs) throw ShapeError("program_call: no output " + std::to_string(order[i]));
          in_order = in_order && order[i] == static_cast<int>(i);
        }
        if (!in_order) program->order = std::move(order);
        nb::object self = nb::cast(program.release(), nb::rv_policy::take_ownership);
        PyObject* made = PyCFunction_NewEx(&call_method, self.ptr(), nullptr);
        if (!made) throw PythonError();
        return nb::steal(made);
      },
      nb::arg("compiled"), nb::arg("function"), nb::arg("careful"), nb::arg("seed").none(), nb::arg("hooks"), nb::arg("places"),
      nb::arg("constants"), nb::arg("grad_places"), nb::arg("fixed"), nb::arg("order"));
}

}  // namespace fulmen::python
