// The binding of attention's own entries: a short one for fulmen.sdpa as it is mostly called, and one with every option.
// Gradients are recorded here too (autograd.h); autocast, dropout's seed and what is no plain tensor are dealt with in
// python/fulmen/_attention.py before it calls again.
#include "sdpa.h"

#include <cmath>

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "autograd.h"
#include "bindings.h"
#include "core/error.h"
#include "python_error.h"
#include "torch_state.h"

namespace fulmen::python {
namespace {

constexpr const char* argument_names[sdpa_operand_count] = {
    "sdpa: query", "sdpa: key", "sdpa: value", "sdpa: attn_mask", "sdpa: sink", "sdpa: alibi_slopes",
    "sdpa: query_offsets", "sdpa: key_offsets", "sdpa: key_lengths", "sdpa: seed"};

// Everything that outlives a call, kept with the module.
struct SdpaContext {
  SdpaCache cache;
  PyObject* function = nullptr;  // the torch.autograd.Function
  ExecutorList executors;        // empty: the default list
  const ExecutorList& list() const { return executors.empty() ? default_list() : executors; }
};

SdpaContext& context() {
  static SdpaContext* instance = new SdpaContext();
  return *instance;
}

void check_number(double value, const char* name) {
  if (std::isnan(value)) throw ShapeError(std::string("sdpa: ") + name + " is NaN, needed a number");
}

// One call, its tensors read: what both entries fill and run() takes.
struct SdpaCallArguments {
  TensorReader reader;
  SdpaRequest request;
  std::array<TensorView, sdpa_operand_count> views;  // of the operands that are given, in order
  std::array<PyObject*, sdpa_operand_count> objects;
  size_t count = 0;
  bool any_grad = false;

  void add(size_t operand, PyObject* object, bool needs_grad) {
    request.views[operand] = reader.read(object, argument_names[operand]);
    request.given[operand] = true;
    request.needs_grad[operand] = needs_grad;
    any_grad |= needs_grad;
    views[count] = request.views[operand];
    objects[count++] = object;
  }
  std::span<const TensorView> given_views() const { return {views.data(), count}; }
  std::span<PyObject* const> given_objects() const { return {objects.data(), count}; }
};

// What the backward of one call needs beside its saved tensors.
class SdpaBackward : public BackwardState {
 public:
  SdpaBackward(std::shared_ptr<const SdpaEntry> entry, std::unique_ptr<Saved> saved) : entry_(std::move(entry)), saved_(std::move(saved)) {}

  PyObject* backward(PyObject* tensors, PyObject* const* grads, Py_ssize_t count) override {
    const std::span<PyObject* const> given{grads, static_cast<size_t>(count)};
    const std::shared_ptr<const CompiledTrace> fitting = entry_->backward_for(given);
    std::vector<nb::object> results;
    try {
      results = entry_->compiled->backward(*saved_, given, items_of(tensors, "saved tensors"), fitting ? &*fitting->backward : nullptr);
    } catch (const UnsupportedError& error) {
      // Revoked when it ran, and nobody else takes it.
      if (entry_->compiled->target().kind != DeviceKind::cuda || saved_->released) throw;
      results = with_torch(items_of(tensors, "saved tensors"), given, error.what());
    }
    if (!torch_state().keeps_graph()) saved_->release();
    return tuple_of(results);
  }

 private:
  // The gradients by PyTorch, one an input of the program.
  std::vector<nb::object> with_torch(std::span<PyObject* const> tensors, std::span<PyObject* const> grads, const char* why) const {
    const CompiledTrace& trace = entry_->compiled->trace();
    nb::list operands, needs, incoming;
    for (int i = 0; i < sdpa_operand_count; ++i) operands.append(nb::none()), needs.append(false);
    for (size_t k = 0; k < trace.backward_saved_inputs.size(); ++k)
      operands[static_cast<size_t>(entry_->operands[static_cast<size_t>(trace.backward_saved_inputs[k])])] = nb::borrow(tensors[k]);
    for (int input : trace.inputs_with_grad) needs[static_cast<size_t>(entry_->operands[static_cast<size_t>(input)])] = true;
    for (PyObject* grad : grads) incoming.append(nb::borrow(grad));
    nb::object answer = nb::module_::import_("fulmen._attention").attr("backward_with_torch")(operands, incoming, needs, entry_->attributes(), why);
    std::vector<nb::object> results;
    for (int operand : entry_->operands) results.push_back(answer[static_cast<size_t>(operand)]);
    return results;
  }

  std::shared_ptr<const SdpaEntry> entry_;
  std::unique_ptr<Saved> saved_;
};

class SdpaForward : public PendingForward {
 public:
  SdpaForward(const std::shared_ptr<const SdpaEntry>& entry, const SdpaCallArguments& arguments) : entry_(entry), arguments_(arguments) {}

  Result run() override {
    const Compiled& compiled = *entry_->compiled;
    Compiled::Results made =
        compiled.forward_unchecked(framework_of(arguments_.objects[0]), arguments_.given_views(), arguments_.given_objects(), false);
    Result result;
    const std::vector<int>& inputs = compiled.trace().backward_saved_inputs;
    const std::vector<int>& outputs = compiled.saved_outputs();
    result.saved = PyTuple_New(static_cast<Py_ssize_t>(inputs.size() + outputs.size()));
    if (!result.saved) throw PythonError();
    Py_ssize_t next = 0;
    for (int i : inputs) PyTuple_SET_ITEM(result.saved, next++, Py_NewRef(arguments_.objects[static_cast<size_t>(i)]));
    for (int i : outputs) PyTuple_SET_ITEM(result.saved, next++, made.outputs[static_cast<size_t>(i)].inc_ref().ptr());
    result.state = std::make_unique<SdpaBackward>(entry_, std::move(made.saved));
    result.outputs = made.outputs.size() == 1 ? made.outputs[0].release().ptr() : tuple_of(made.outputs);
    return result;
  }

 private:
  const std::shared_ptr<const SdpaEntry>& entry_;
  const SdpaCallArguments& arguments_;
};

// The result of a call: a tensor, or (result, log-sum-exp).
PyObject* run(SdpaCallArguments& arguments, const std::shared_ptr<const SdpaEntry>& entry) {
  if (arguments.any_grad) return SdpaForward(entry, arguments).apply(context().function, arguments.objects.data(), arguments.count);
  Compiled::Results results =
      entry->compiled->forward_unchecked(framework_of(arguments.objects[0]), arguments.given_views(), arguments.given_objects(), false);
  return results.outputs.size() == 1 ? results.outputs[0].release().ptr() : tuple_of(results.outputs);
}

bool as_bool(PyObject* object, bool& value) {
  value = object == Py_True;
  return PyBool_Check(object);
}

bool as_number(PyObject* object, double& value) {
  if (PyFloat_CheckExact(object)) {
    value = PyFloat_AS_DOUBLE(object);
    return true;
  }
  if (!PyLong_CheckExact(object)) return false;
  value = PyLong_AsDouble(object);
  if (value != -1.0 || !PyErr_Occurred()) return true;
  PyErr_Clear();
  return false;
}

// Tensors are plain and no transform is on: the fast entries may take the call.
bool takes(PyObject* const* tensors, size_t count) {
  const TorchState& torch = torch_state();
  if (!torch.loaded()) return false;
  for (size_t i = 0; i < count; ++i)
    if (tensors[i] == Py_None ? i < 3 : !torch.is_plain(tensors[i])) return false;
  return !torch.is_transformed();
}

void read_tensors(SdpaCallArguments& arguments, PyObject* const* tensors, size_t count) {
  const TorchState& torch = torch_state();
  const bool recorded = torch.grad_enabled();
  for (size_t i = 0; i < count; ++i)
    if (tensors[i] != Py_None) arguments.add(i, tensors[i], recorded && torch.requires_grad(tensors[i]));
  arguments.request.query = tensors[0];
  const Device device = arguments.views[0].device;
  for (size_t i = 1; i < count; ++i)
    if (arguments.request.given[i] && !(arguments.request.views[i].device == device))
      throw TypeError(std::string(argument_names[i]) + " is on " + to_string(arguments.request.views[i].device) + ", query is on " +
                      to_string(device) + "; all must be on one device");
}

// The plain call. NotImplemented where the general path has to decide or to explain: autocast or a transform is on, an
// operand is no plain tensor, nobody claims the call.
PyObject* sdpa_plain(PyObject*, PyObject* const* args, Py_ssize_t count) {
  // query, key, value, attn_mask, is_causal, scale, enable_gqa
  try {
    SdpaCallArguments arguments;
    SdpaOptions& options = arguments.request.options;
    std::shared_ptr<const SdpaEntry> entry;
    try {
      if (count != 7 || !as_bool(args[4], options.is_causal) || !as_bool(args[6], options.enable_gqa)) Py_RETURN_NOTIMPLEMENTED;
      if (args[5] != Py_None) {
        if (!as_number(args[5], options.scale)) Py_RETURN_NOTIMPLEMENTED;
        options.has_scale = true;
        check_number(options.scale, "scale");
      }
      if (!takes(args, 4)) Py_RETURN_NOTIMPLEMENTED;
      read_tensors(arguments, args, 4);
      options.deterministic = torch_state().deterministic();
      entry = context().cache.find(arguments.request, context().list());
    } catch (const std::exception&) {
      Py_RETURN_NOTIMPLEMENTED;  // the general path meets the same error and raises it
    }
    return run(arguments, entry);
  } catch (...) {
    return raise_python();
  }
}

// The general call: the operands in the order of ops/sdpa_call.h, None where absent, then is_causal, lower_right,
// enable_gqa, window_left, window_right, dropout_p, scale, softcap, with_lse, deterministic, executors (None: the default
// list), prepared. `prepared`: the caller has dealt with autocast and transforms. NotImplemented as above, if not prepared.
PyObject* sdpa_call(PyObject*, PyObject* const* args, Py_ssize_t count) {
  try {
    if (count != sdpa_operand_count + 12) throw TypeError("sdpa: " + std::to_string(sdpa_operand_count + 12) + " arguments are needed, " + std::to_string(count) + " given");
    PyObject* const* option = args + sdpa_operand_count;
    const bool prepared = option[11] == Py_True;
    SdpaCallArguments arguments;
    SdpaOptions& o = arguments.request.options;
    std::shared_ptr<const SdpaEntry> entry;
    try {
      double left = -1, right = -1;
      const bool understood = as_bool(option[0], o.is_causal) && as_bool(option[1], o.lower_right) && as_bool(option[2], o.enable_gqa) &&
                              as_number(option[3], left) && as_number(option[4], right) && as_number(option[5], o.dropout_p) &&
                              as_number(option[7], o.softcap) && as_bool(option[8], o.with_lse) &&
                              (option[9] == Py_None || as_bool(option[9], o.deterministic));
      if (understood && option[6] != Py_None) o.has_scale = true;
      if (!understood || (o.has_scale && !as_number(option[6], o.scale))) {
        if (!prepared) Py_RETURN_NOTIMPLEMENTED;
        throw TypeError("sdpa: an option is of another type than its documentation says");
      }
      o.window_left = static_cast<int64_t>(left);
      o.window_right = static_cast<int64_t>(right);
      check_number(o.scale, "scale");
      check_number(o.dropout_p, "dropout_p");
      check_number(o.softcap, "softcap");
      if (!prepared && !takes(args, sdpa_operand_count)) Py_RETURN_NOTIMPLEMENTED;
      for (size_t i = 0; i < 3; ++i)
        if (args[i] == Py_None) throw TypeError(std::string(argument_names[i]) + " is None; a tensor is needed");
      read_tensors(arguments, args, sdpa_operand_count);
      if (option[9] == Py_None) o.deterministic = torch_state().deterministic();
      if (option[10] == Py_None) entry = context().cache.find(arguments.request, context().list());
      else entry = context().cache.find(arguments.request, executors_of(option[10]));
    } catch (const std::exception&) {
      if (prepared) throw;
      Py_RETURN_NOTIMPLEMENTED;
    }
    return run(arguments, entry);
  } catch (...) {
    return raise_python();
  }
}

PyMethodDef call_method{"sdpa_call", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(sdpa_call)), METH_FASTCALL,
                        "attention with every option, or NotImplemented"};
PyMethodDef plain_method{"sdpa_plain", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(sdpa_plain)), METH_FASTCALL,
                         "sdpa, or NotImplemented"};

}  // namespace

void bind_sdpa(nb::module_& m) {
  m.def("sdpa_use_torch", [](nb::handle function) {
    torch_state().load();
    context().function = function.inc_ref().ptr();
  });
  m.def("sdpa_use_executors", [](nb::handle executors) {
    context().executors = executors.is_none() ? ExecutorList() : executors_of(executors);
    context().cache.clear();
  }, nb::arg("executors").none());
  m.def("sdpa_cache_info", [] {
    const SdpaCache& cache = context().cache;
    nb::dict info;
    info["programs"] = cache.size();
    info["hits"] = cache.hits;
    info["builds"] = cache.builds;
    info["dropped"] = cache.dropped;
    return info;
  });
  m.def("sdpa_cache_clear", [] { context().cache.clear(); });
  m.attr("sdpa_call") = nb::steal(PyCFunction_NewEx(&call_method, nullptr, nullptr));
  m.attr("sdpa_plain") = nb::steal(PyCFunction_NewEx(&plain_method, nullptr, nullptr));
}

}  // namespace fulmen::python
