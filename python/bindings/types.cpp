// Tensor specs, traces and the op catalogue as Python sees them.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"
#include "dlpack.h"
#include "ir/print.h"
#include "ops/table.h"

namespace fulmen::python {
namespace {

nb::object attr_to_python(const AttrValue& value) {
  return std::visit(
      [](const auto& v) -> nb::object {
        using T = std::decay_t<decltype(v)>;
        if constexpr (std::is_same_v<T, std::monostate>) return nb::none();
        else if constexpr (std::is_same_v<T, DType>) return nb::str(std::string(dtype_name(v)).c_str());
        else return nb::cast(v);
      },
      value);
}

const char* kind_name(AttrKind kind) {
  switch (kind) {
    case AttrKind::boolean: return "boolean";
    case AttrKind::integer: return "integer";
    case AttrKind::number: return "number";
    case AttrKind::text: return "text";
    case AttrKind::dims: return "dims";
    case AttrKind::dtype: return "dtype";
  }
  return "";
}

// {"name", "doc", "operands": [(name, need)], "attributes": [(name, kind, has default, default)], "torch", "primitive",
//  "differentiable"}
nb::dict describe_op(const OpDef& op) {
  nb::dict entry;
  entry["name"] = op.name;
  entry["doc"] = op.doc;
  nb::list operands, attributes;
  for (const OperandDef& operand : op.operands)
    operands.append(nb::make_tuple(operand.name, operand.need == Need::required   ? "required"
                                                 : operand.need == Need::optional ? "optional"
                                                                                  : "variadic"));
  for (const AttrDef& attr : op.attributes)
    attributes.append(nb::make_tuple(attr.name, kind_name(attr.kind), attr.fallback.has_value(),
                                     attr.fallback ? attr_to_python(*attr.fallback) : nb::object(nb::none())));
  entry["operands"] = operands;
  entry["attributes"] = attributes;
  entry["torch"] = op.torch;
  entry["primitive"] = op.is_primitive();
  entry["differentiable"] = !std::holds_alternative<NotDifferentiable>(op.gradient);
  return entry;
}

}  // namespace

void bind_types(nb::module_& m) {
  nb::class_<TensorType>(m, "TensorType", "What is known of a tensor before it exists")
      .def_prop_ro("dtype", [](const TensorType& t) { return std::string(dtype_name(t.dtype)); })
      .def_prop_ro("shape", [](const TensorType& t) { return nb::tuple(nb::cast(t.shape)); })
      .def_prop_ro("strides", [](const TensorType& t) { return nb::tuple(nb::cast(t.strides)); })
      .def_prop_ro("device", [](const TensorType& t) { return to_string(t.device); })
      .def_ro("requires_grad", &TensorType::requires_grad)
      .def("__eq__", [](const TensorType& a, const TensorType& b) { return a == b; })
      .def("__str__", [](const TensorType& t) { return to_string(t); })
      .def("__repr__", [](const TensorType& t) { return "TensorType('" + to_string(t) + "')"; });
  m.def("parse_tensor_spec", [](const std::string& text) { return parse_tensor_spec(text); });
  // The type of a tensor of any framework.
  m.def(
      "type_of",
      [](nb::handle tensor, bool requires_grad, const std::string& what) {
        TensorReader reader;
        TensorType type = reader.read(tensor.ptr(), what.c_str()).type();
        type.requires_grad = requires_grad && is_float(type.dtype);
        return type;
      },
      nb::arg("tensor").none(), nb::arg("requires_grad") = false, nb::arg("what") = "tensor");
  m.def("is_tensor", [](nb::handle object) { return is_tensor(object.ptr()); }, nb::arg("object").none());

  nb::class_<Trace>(m, "Trace", "A straight-line program over typed values")
      .def_ro("name", &Trace::name)
      .def_prop_ro("node_count", [](const Trace& t) { return t.nodes.size(); })
      .def_prop_ro("input_types",
                   [](const Trace& t) {
                     std::vector<TensorType> types;
                     for (ValueId id : t.inputs) types.push_back(t.type(id));
                     return types;
                   })
      .def_prop_ro("output_types",
                   [](const Trace& t) {
                     std::vector<std::optional<TensorType>> types;
                     for (ValueId id : t.outputs) types.push_back(id == no_value ? std::nullopt : std::optional(t.type(id)));
                     return types;
                   })
      .def("__str__", [](const Trace& t) { return to_string(t); });

  m.def("ops", [] {
    nb::list entries;
    for (const OpDef* op : all_ops()) entries.append(describe_op(*op));
    return entries;
  });
  m.def("release_memory", [] { BufferPool::instance().release_free(); });
  m.def("memory", [] {
    const BufferPool::Counts counts = BufferPool::instance().counts();
    nb::dict result;
    result["live_bytes"] = counts.live_bytes;
    result["peak_bytes"] = counts.peak_bytes;
    result["kept_bytes"] = counts.kept_bytes;
    result["reused"] = counts.reused;
    result["allocated"] = counts.allocated;
    return result;
  });
}

}  // namespace fulmen::python
