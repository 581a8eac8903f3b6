// Executors written in Python: the C++ interface with three Python callables behind it. What the callables mean is in
// python/fulmen/_python_executor.py. Errors raised by a kernel become DeviceError, so that the claim is revoked and the
// next executor runs the call.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"
#include "core/error.h"
#include "dlpack.h"

namespace fulmen::python {
namespace {

// A Python object that may be dropped by any thread.
class Shared {
 public:
  Shared() = default;
  explicit Shared(nb::object object)
      : object_(new nb::object(std::move(object)), [](nb::object* held) {
          nb::gil_scoped_acquire locked;
          delete held;
        }) {}
  const nb::object& operator*() const { return *object_; }

 private:
  std::shared_ptr<nb::object> object_;
};

nb::object types_to_python(const std::vector<const TensorType*>& types) {
  nb::list list;
  for (const TensorType* type : types) list.append(type ? nb::cast(*type) : nb::object(nb::none()));
  return list;
}

nb::dict attributes_to_python(const Attributes* attrs) {
  nb::dict dict;
  if (!attrs) return dict;
  for (const auto& [name, value] : *attrs)
    dict[name.c_str()] = std::visit(
        [](const auto& v) -> nb::object {
          using T = std::decay_t<decltype(v)>;
          if constexpr (std::is_same_v<T, std::monostate>) return nb::none();
          else if constexpr (std::is_same_v<T, DType>) return nb::str(std::string(dtype_name(v)).c_str());
          else return nb::cast(v);
        },
        value);
  return dict;
}

// "ValueError: message"
std::string summary(const nb::python_error& error) {
  return std::string(nb::str(error.type().attr("__name__")).c_str()) + ": " + nb::str(error.value()).c_str();
}

const std::pair<std::string_view, RefusalCode>* find_code(std::string_view name) {
  static const auto* codes = [] {
    auto* list = new std::vector<std::pair<std::string_view, RefusalCode>>();
    for (int i = 0; i <= static_cast<int>(RefusalCode::revoked); ++i)
      list->emplace_back(code_name(static_cast<RefusalCode>(i)), static_cast<RefusalCode>(i));
    return list;
  }();
  for (const auto& entry : *codes)
    if (entry.first == name) return &entry;
  return nullptr;
}

// Types are copied: a kernel outlives the trace that it was made from.
struct OwnedTypes {
  std::vector<TensorType> types;
  std::vector<bool> given;
  explicit OwnedTypes(const std::vector<const TensorType*>& from) {
    for (const TensorType* type : from) {
      types.push_back(type ? *type : TensorType{});
      given.push_back(type != nullptr);
    }
  }
};

class PythonKernel : public Kernel {
 public:
  PythonKernel(std::string name, Shared run, const Call& call)
      : name_(std::move(name)), run_(std::move(run)), op_(call.op->name), inputs_(call.inputs), outputs_(call.outputs) {
    attrs_ = Shared(attributes_to_python(call.attrs));
  }

  void run(const RunContext&, const void* const* inputs, void* const* outputs) const override {
    nb::gil_scoped_acquire locked;
    try {
      nb::list in, out;
      for (size_t i = 0; i < inputs_.types.size(); ++i) in.append(view(inputs_, i, const_cast<void*>(inputs[i])));
      for (size_t i = 0; i < outputs_.types.size(); ++i) out.append(view(outputs_, i, outputs[i]));
      (*run_)(op_, in, out, *attrs_);
    } catch (nb::python_error& error) {
      throw DeviceError(name_ + ": " + op_ + " raised " + summary(error));
    }
  }

 private:
  static nb::object view(const OwnedTypes& types, size_t i, void* data) {
    if (!types.given[i] || (!data && types.types[i].element_count() > 0)) return nb::none();
    return nb::steal(view_tensor(running_framework(), types.types[i], data));
  }

  std::string name_;
  Shared run_;
  std::string op_;
  OwnedTypes inputs_, outputs_;
  Shared attrs_;
};

class PythonExecutor : public Executor {
 public:
  PythonExecutor(std::string name, std::string doc, nb::object claim, nb::object run)
      : name_(std::move(name)), doc_(std::move(doc)), claim_(std::move(claim)), run_(std::move(run)) {}

  std::string_view name() const override { return name_; }
  std::string_view doc() const override { return doc_; }

  Claim claim(const Call& call, const Target& target) const override {
    nb::gil_scoped_acquire locked;
    // None refuses nothing; (code, reason) refuses; a dict describes the plan.
    nb::object answer;
    try {
      answer = (*claim_)(call.op->name, types_to_python(call.inputs), types_to_python(call.outputs), attributes_to_python(call.attrs),
                         call.training, call.deterministic, nb::cast(target));
    } catch (nb::python_error& error) {
      throw InternalError(name_ + ": the checker of " + call.op->name + " raised " + summary(error));
    }
    if (nb::isinstance<nb::tuple>(answer)) {
      const auto code = nb::cast<std::string>(answer[0]);
      const auto* found = find_code(code);
      if (!found) throw InternalError(name_ + ": '" + code + "' is not a refusal code");
      return Refusal{found->second, nb::cast<std::string>(answer[1])};
    }
    Plan plan;
    const auto dict = nb::cast<nb::dict>(answer);
    plan.forward.kernel = nb::cast<std::string>(dict["forward"]);
    if (dict.contains("backward")) plan.backward = PlanDirection{nb::cast<std::string>(dict["backward"]), 0};
    plan.deterministic = nb::cast<bool>(dict["deterministic"]);
    return plan;
  }

  std::unique_ptr<Kernel> make_kernel(const Call& call, const Plan&, const Target&) const override {
    nb::gil_scoped_acquire locked;
    return std::make_unique<PythonKernel>(name_, run_, call);
  }

 private:
  std::string name_, doc_;
  Shared claim_, run_;
};

}  // namespace

void bind_python_executor(nb::module_& m) {
  m.def("make_python_executor", [](const std::string& name, const std::string& doc, nb::object claim, nb::object run) {
    return ExecutorHandle{std::make_shared<PythonExecutor>(name, doc, std::move(claim), std::move(run))};
  });
  m.def("refusal_codes", [] {
    std::vector<std::string> names;
    for (int i = 0; i <= static_cast<int>(RefusalCode::revoked); ++i) names.emplace_back(code_name(static_cast<RefusalCode>(i)));
    return names;
  });
}

}  // namespace fulmen::python
