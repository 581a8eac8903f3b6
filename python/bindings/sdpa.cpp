// The binding of attention's own entry: a fast call for the plain case (no gradient, no autocast), and a general one
// that python/fulmen/attention.py builds autograd on.
#include "sdpa.h"

#include <cmath>

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"
#include "core/error.h"

namespace fulmen::python {
namespace {

constexpr const char* argument_names[sdpa_operand_count] = {
    "sdpa: query", "sdpa: key", "sdpa: value", "sdpa: attn_mask", "sdpa: sink", "sdpa: alibi_slopes",
    "sdpa: query_offsets", "sdpa: key_offsets", "sdpa: key_lengths", "sdpa: seed"};

// What the fast call asks PyTorch: looked up once.
struct TorchState {
  PyObject* tensor_type = nullptr;
  PyObject* parameter_type = nullptr;
  PyObject* is_grad_enabled = nullptr;
  PyObject* is_any_autocast_enabled = nullptr;
  PyObject* requires_grad = nullptr;

  bool usable(PyObject* object) const {
    PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(object));
    return type == tensor_type || type == parameter_type;
  }
};

bool ask(PyObject* function) {
  PyObject* answer = PyObject_CallNoArgs(function);
  if (!answer) throw nb::python_error();
  const bool yes = answer != Py_False;
  Py_DECREF(answer);
  return yes;
}

bool has_grad(const TorchState& state, PyObject* tensor) {
  PyObject* answer = PyObject_GetAttr(tensor, state.requires_grad);
  if (!answer) throw nb::python_error();
  const bool yes = answer != Py_False;
  Py_DECREF(answer);
  return yes;
}

// Everything that outlives a call, kept with the module.
struct SdpaContext {
  SdpaCache cache;
  TorchState torch;
  ExecutorList executors;  // empty: the default list
  const ExecutorList& list() const { return executors.empty() ? default_list() : executors; }
};

SdpaContext& context() {
  static SdpaContext* instance = new SdpaContext();
  return *instance;
}

void check_number(double value, const char* name) {
  if (std::isnan(value)) throw ShapeError(std::string("sdpa: ") + name + " is NaN");
}

// The plain call. NotImplemented where the general path has to decide: a gradient is wanted, autocast is on, dropout
// needs a seed, or an operand is no plain tensor.
PyObject* sdpa_plain(PyObject*, PyObject* const* args, Py_ssize_t count) {
  // query, key, value, attn_mask, is_causal, scale, enable_gqa
  const TorchState& torch = context().torch;
  if (count != 7 || !torch.usable(args[0]) || !torch.usable(args[1]) || !torch.usable(args[2]) ||
      (args[3] != Py_None && !torch.usable(args[3])) || !PyBool_Check(args[4]) || !PyBool_Check(args[6]) ||
      !(args[5] == Py_None || PyFloat_Check(args[5]) || PyLong_Check(args[5])))
    Py_RETURN_NOTIMPLEMENTED;
  if (torch.is_any_autocast_enabled && ask(torch.is_any_autocast_enabled)) Py_RETURN_NOTIMPLEMENTED;
  const bool has_mask = args[3] != Py_None;
  if ((has_grad(torch, args[0]) || has_grad(torch, args[1]) || has_grad(torch, args[2]) || (has_mask && has_grad(torch, args[3]))) &&
      ask(torch.is_grad_enabled))
    Py_RETURN_NOTIMPLEMENTED;
  TensorReader reader;
  SdpaRequest request;
  std::array<TensorView, 4> views;
  std::array<PyObject*, 4> objects;
  size_t used = 0;
  for (size_t i = 0; i < (has_mask ? 4u : 3u); ++i) {
    request.views[i] = reader.read(args[i], argument_names[i]);
    request.given[i] = true;
    views[used] = request.views[i];
    objects[used++] = args[i];
  }
  request.options.is_causal = args[4] == Py_True;
  request.options.enable_gqa = args[6] == Py_True;
  if (args[5] != Py_None) {
    request.options.scale = PyFloat_AsDouble(args[5]);
    request.options.has_scale = true;
    check_number(request.options.scale, "scale");
  }
  const std::shared_ptr<const SdpaEntry> entry = context().cache.find(request, context().list());
  Compiled::Results results = entry->compiled->forward_unchecked(framework_of(args[0]), {views.data(), used}, {objects.data(), used}, false);
  return results.outputs[0].release().ptr();
}

PyObject* sdpa_plain_entry(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  // A C function has no translator of errors; the general path meets the same error and raises it.
  try {
    return sdpa_plain(self, args, count);
  } catch (const std::exception&) {
    Py_RETURN_NOTIMPLEMENTED;
  }
}

// The general call: `operands` in the order of ops/sdpa_call.h, None where absent.
nb::object sdpa_call(nb::handle operands, std::vector<bool> needs_grad, bool is_causal, bool lower_right, bool enable_gqa,
                     int64_t window_left, int64_t window_right, double dropout_p, nb::handle scale, double softcap, bool with_lse,
                     bool deterministic, nb::handle executors) {
  const std::span<PyObject* const> items = items_of(operands, "sdpa: operands");
  if (items.size() != sdpa_operand_count || needs_grad.size() != sdpa_operand_count)
    throw TypeError("sdpa: " + std::to_string(sdpa_operand_count) + " operands are needed, " + std::to_string(items.size()) + " given");
  TensorReader reader;
  SdpaRequest request;
  std::vector<PyObject*> objects;
  for (size_t i = 0; i < items.size(); ++i) {
    if (items[i] == Py_None) continue;
    request.views[i] = reader.read(items[i], argument_names[i]);
    request.given[i] = true;
    request.needs_grad[i] = needs_grad[i];
    objects.push_back(items[i]);
  }
  for (size_t i = 0; i < 3; ++i)
    if (!request.given[i]) throw TypeError(std::string(argument_names[i]) + " is None; a tensor is needed");
  for (size_t i = 1; i < items.size(); ++i)
    if (request.given[i] && !(request.views[i].device == request.views[0].device))
      throw TypeError(std::string(argument_names[i]) + " is on " + to_string(request.views[i].device) + ", query is on " +
                      to_string(request.views[0].device) + "; all must be on one device");
  SdpaOptions& o = request.options;
  o.is_causal = is_causal;
  o.lower_right = lower_right;
  o.enable_gqa = enable_gqa;
  o.window_left = window_left;
  o.window_right = window_right;
  o.dropout_p = dropout_p;
  o.softcap = softcap;
  o.with_lse = with_lse;
  o.deterministic = deterministic;
  if (!scale.is_none()) {
    o.scale = nb::cast<double>(scale);
    o.has_scale = true;
    check_number(o.scale, "scale");
  }
  check_number(dropout_p, "dropout_p");
  check_number(softcap, "softcap");
  std::shared_ptr<const SdpaEntry> entry;
  if (executors.is_none()) {
    entry = context().cache.find(request, context().list());
  } else {
    SdpaCache once(1);
    entry = once.find(request, executors_of(executors));
  }
  std::vector<TensorView> views;
  for (int operand : entry->operands) views.push_back(request.views[static_cast<size_t>(operand)]);
  Compiled::Results results = entry->compiled->forward_unchecked(framework_of(items[0]), views, objects, false);
  nb::list outputs;
  for (nb::object& output : results.outputs) outputs.append(std::move(output));
  nb::object saved = results.saved ? nb::cast(results.saved.release(), nb::rv_policy::take_ownership) : nb::object(nb::none());
  return nb::make_tuple(outputs, saved, nb::cast(std::const_pointer_cast<SdpaEntry>(entry)));
}

PyMethodDef plain_method{"sdpa_plain", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(sdpa_plain_entry)), METH_FASTCALL,
                         "sdpa without gradients, or NotImplemented"};

}  // namespace

void bind_sdpa(nb::module_& m) {
  nb::class_<SdpaEntry>(m, "SdpaEntry", "The program of one kind of attention call")
      .def_ro("operands", &SdpaEntry::operands)
      .def_prop_ro("saved_operands",
                   [](const SdpaEntry& entry) {
                     std::vector<int> operands;
                     for (int input : entry.compiled->trace().backward_saved_inputs)
                       operands.push_back(entry.operands[static_cast<size_t>(input)]);
                     return operands;
                   })
      .def_prop_ro("saved_outputs", [](const SdpaEntry& entry) { return entry.compiled->saved_outputs(); })
      .def_prop_ro("compiled", [](const SdpaEntry& entry) -> const Compiled& { return *entry.compiled; }, nb::rv_policy::reference_internal)
      // One gradient an operand, None where there is none.
      .def(
          "backward",
          [](const SdpaEntry& entry, Saved& saved, nb::handle grads, nb::handle inputs, bool release) {
            std::vector<nb::object> results = entry.compiled->backward(saved, items_of(grads, "grads"), items_of(inputs, "inputs"));
            if (release) saved.release();
            nb::list list;
            for (int i = 0; i < sdpa_operand_count; ++i) list.append(nb::none());
            for (size_t i = 0; i < results.size(); ++i) list[static_cast<size_t>(entry.operands[i])] = std::move(results[i]);
            return list;
          },
          nb::arg("saved"), nb::arg("grads"), nb::arg("inputs"), nb::arg("release"));
  m.def("sdpa_call", sdpa_call, nb::arg("operands"), nb::arg("needs_grad"), nb::arg("is_causal"), nb::arg("lower_right"),
        nb::arg("enable_gqa"), nb::arg("window_left"), nb::arg("window_right"), nb::arg("dropout_p"), nb::arg("scale").none(),
        nb::arg("softcap"), nb::arg("with_lse"), nb::arg("deterministic"), nb::arg("executors").none());
  m.def("sdpa_use_torch", [](nb::handle tensor_type, nb::handle parameter_type, nb::handle is_grad_enabled, nb::handle autocast) {
    TorchState& torch = context().torch;
    torch.tensor_type = tensor_type.inc_ref().ptr();
    torch.parameter_type = parameter_type.inc_ref().ptr();
    torch.is_grad_enabled = is_grad_enabled.inc_ref().ptr();
    torch.is_any_autocast_enabled = autocast.is_none() ? nullptr : autocast.inc_ref().ptr();
    torch.requires_grad = PyUnicode_InternFromString("requires_grad");
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
  m.attr("sdpa_plain") = nb::steal(PyCFunction_NewEx(&plain_method, nullptr, nullptr));
}

}  // namespace fulmen::python
