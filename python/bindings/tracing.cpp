// fulmen._core.Recorder: what Python front ends record programs with, and the signatures of the op catalogue that they
// bind calls by. Values are integers here; the front end gives them their meaning (python/fulmen/torch_backend).
#include "tracing/recorder.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>

#include "core/error.h"
#include "ops/table.h"

namespace nb = nanobind;

namespace fulmen {
namespace {

DType dtype_of(const std::string& text) {
  if (const auto dtype = parse_dtype(text)) return *dtype;
  throw TypeError("dtype '" + text + "' is not known to fulmen");
}

Device device_of(const std::string& text) {
  const size_t colon = text.find(':');
  const std::string kind = text.substr(0, colon);
  Device device;
  if (kind == "cuda")
    device.kind = DeviceKind::cuda;
  else if (kind == "meta")
    device.kind = DeviceKind::meta;
  else if (kind != "cpu")
    throw TypeError("device '" + text + "' is not known to fulmen; it takes cpu, cuda and meta");
  if (colon != std::string::npos) device.index = std::stoi(text.substr(colon + 1));
  return device;
}

int64_t integer_of(nb::handle value, const std::string& what) {
  int64_t number = 0;
  if (!nb::try_cast(value, number))
    throw TypeError(what + " is " + nb::repr(value).c_str() + ", needed an integer of 64 bits");
  return number;
}

Dims dims_of(nb::handle value, const std::string& what) {
  Dims dims;
  for (nb::handle item : value) dims.push_back(integer_of(item, what));
  return dims;
}

AttrValue attribute_of(const OpDef& op, const std::string& name, nb::handle value) {
  const auto def = std::find_if(op.attributes.begin(), op.attributes.end(), [&](const AttrDef& d) { return d.name == name; });
  if (def == op.attributes.end()) throw TypeError(op.name + ": there is no attribute '" + name + "'");
  if (value.is_none()) return std::monostate{};
  const auto what = [&] { return op.name + ": " + name; };
  if (def->kind == AttrKind::dims && nb::isinstance<nb::int_>(value)) return Dims{integer_of(value, what())};
  if (nb::isinstance<nb::bool_>(value)) return nb::cast<bool>(value);
  if (nb::isinstance<nb::int_>(value)) return integer_of(value, what());
  if (nb::isinstance<nb::float_>(value)) return nb::cast<double>(value);
  if (nb::isinstance<nb::str>(value)) {
    auto text = nb::cast<std::string>(value);
    if (def->kind == AttrKind::dtype) return dtype_of(text);
    return text;
  }
  if (nb::isinstance<nb::list>(value) || nb::isinstance<nb::tuple>(value)) return dims_of(value, what());
  throw TypeError(what() + " is " + nb::repr(value).c_str() + ", needed a number, a text, a dtype's name or a list of integers");
}

std::vector<ValueId> emit(Recorder& recorder, const std::string& name, nb::handle inputs, const nb::dict& attrs) {
  const OpDef& op = require_op(name);
  std::vector<ValueId> ids;
  for (nb::handle item : inputs) ids.push_back(item.is_none() ? no_value : nb::cast<ValueId>(item));
  Attributes attributes;
  for (auto [key, value] : attrs) {
    const auto text = nb::cast<std::string>(key);
    attributes.set(text, attribute_of(op, text, value));
  }
  return recorder.emit(name, std::move(ids), std::move(attributes));
}

nb::tuple tuple_of(const Dims& dims) {
  nb::list list;
  for (int64_t d : dims) list.append(d);
  return nb::tuple(list);
}

nb::tuple type_of(const Recorder& recorder, ValueId id) {
  const TensorType& type = recorder.type(id);
  return nb::make_tuple(std::string(dtype_name(type.dtype)), tuple_of(type.shape), tuple_of(type.strides), type.requires_grad);
}

ValueId number_of(Recorder& recorder, nb::handle value) {
  if (nb::isinstance<nb::bool_>(value)) return recorder.number(nb::cast<bool>(value));
  if (nb::isinstance<nb::int_>(value)) return recorder.number(integer_of(value, "a number"));
  if (nb::isinstance<nb::float_>(value)) return recorder.number(nb::cast<double>(value));
  throw TypeError("a number must be a bool, an int or a float");
}

const char* kind_text(AttrKind kind) {
  switch (kind) {
    case AttrKind::boolean: return "bool";
    case AttrKind::integer: return "int";
    case AttrKind::number: return "number";
    case AttrKind::text: return "text";
    case AttrKind::dims: return "dims";
    case AttrKind::dtype: return "dtype";
  }
  return "";
}

const char* need_text(Need need) {
  switch (need) {
    case Need::required: return "required";
    case Need::optional: return "optional";
    case Need::variadic: return "variadic";
  }
  return "";
}

nb::list signatures() {
  nb::list result;
  for (const OpDef* op : all_ops()) {
    nb::list operands, attributes, names;
    for (const OperandDef& operand : op->operands) operands.append(nb::make_tuple(operand.name, need_text(operand.need)));
    for (const AttrDef& attr : op->attributes)
      attributes.append(nb::make_tuple(attr.name, kind_text(attr.kind), attr.fallback.has_value()));
    for (const std::string& name : op->torch) names.append(name);
    result.append(nb::make_tuple(op->name, operands, attributes, names));
  }
  return result;
}

}  // namespace

void bind_tracing(nb::module_& m) {
  nb::class_<Recorder>(m, "Recorder", "Records a program op by op. Values are integers; None stands for an absent operand.")
      .def(nb::init<std::string>(), nb::arg("name") = "program")
      .def(
          "input",
          [](Recorder& recorder, const std::string& name, const std::string& dtype, nb::handle shape, nb::handle strides,
             const std::string& device, bool requires_grad, bool is_number) {
            TensorType type;
            type.dtype = dtype_of(dtype);
            type.shape = dims_of(shape, "the shape of input '" + name + "'");
            type.strides = strides.is_none() ? contiguous_strides(type.shape) : dims_of(strides, "the strides of input '" + name + "'");
            if (type.strides.size() != type.shape.size())
              throw ShapeError("input '" + name + "' has " + std::to_string(type.shape.size()) + " dims and " +
                               std::to_string(type.strides.size()) + " strides");
            type.device = device_of(device);
            type.requires_grad = requires_grad;
            type.is_number = is_number;
            return recorder.input(name, std::move(type));
          },
          nb::arg("name"), nb::arg("dtype"), nb::arg("shape"), nb::arg("strides").none(), nb::arg("device"),
          nb::arg("requires_grad"), nb::arg("is_number") = false)
      .def("emit", &emit, nb::arg("op"), nb::arg("inputs"), nb::arg("attrs") = nb::dict())
      .def("number", &number_of, nb::arg("value"))
      .def("is_number", &Recorder::is_number, nb::arg("id"))
      .def("type", &type_of, nb::arg("id"), "(dtype, shape, strides, requires_grad)")
      .def(
          "set_autocast",
          [](Recorder& recorder, std::optional<std::string> dtype) {
            recorder.set_autocast(dtype ? std::optional(dtype_of(*dtype)) : std::nullopt);
          },
          nb::arg("dtype").none())
      .def_prop_ro("autocast",
                   [](const Recorder& recorder) -> std::optional<std::string> {
                     if (!recorder.autocast()) return std::nullopt;
                     return std::string(dtype_name(*recorder.autocast()));
                   })
      .def_prop_rw("grad_enabled", &Recorder::grad_enabled, &Recorder::set_grad_enabled)
      .def("detach", &Recorder::detach, nb::arg("id"))
      .def("seed", &Recorder::seed)
      .def_prop_ro("has_seed", &Recorder::has_seed)
      .def("next_offset", &Recorder::next_offset, nb::arg("op_size"))
      .def(
          "output",
          [](Recorder& recorder, nb::handle ids) {
            std::vector<ValueId> values;
            for (nb::handle item : ids) values.push_back(item.is_none() ? no_value : nb::cast<ValueId>(item));
            recorder.output(values);
          },
          nb::arg("ids"))
      .def("finish", &Recorder::finish);
  m.def("op_signatures", &signatures,
        "One (name, operands, attributes, torch names) an op; operands are (name, need), attributes (name, kind, has default).");
}

}  // namespace fulmen
