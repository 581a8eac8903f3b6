#include "ops/builder.h"

#include <algorithm>

#include "ops/table.h"

namespace fulmen {

void CallTypes::shape_error(const std::string& message) const { throw ShapeError(op.name + ": " + message); }
void CallTypes::type_error(const std::string& message) const { throw TypeError(op.name + ": " + message); }

namespace {

bool fits(const AttrValue& value, AttrKind kind) {
  switch (kind) {
    case AttrKind::boolean: return std::holds_alternative<bool>(value);
    case AttrKind::integer: return std::holds_alternative<int64_t>(value) || std::holds_alternative<bool>(value);
    case AttrKind::number:
      return std::holds_alternative<double>(value) || std::holds_alternative<int64_t>(value) || std::holds_alternative<bool>(value);
    case AttrKind::text: return std::holds_alternative<std::string>(value);
    case AttrKind::dims: return std::holds_alternative<Dims>(value);
    case AttrKind::dtype: return std::holds_alternative<DType>(value);
  }
  return false;
}

const char* kind_name(AttrKind kind) {
  switch (kind) {
    case AttrKind::boolean: return "a bool";
    case AttrKind::integer: return "an integer";
    case AttrKind::number: return "a number";
    case AttrKind::text: return "text";
    case AttrKind::dims: return "a list of integers";
    case AttrKind::dtype: return "a dtype";
  }
  return "";
}

// Checks the attributes against the signature and fills defaults.
void complete_attributes(const OpDef& op, Attributes& attrs) {
  for (const auto& [name, value] : attrs) {
    const auto def = std::find_if(op.attributes.begin(), op.attributes.end(), [&](const AttrDef& d) { return d.name == name; });
    if (def == op.attributes.end()) throw TypeError(op.name + ": there is no attribute '" + name + "'");
    const bool absent = std::holds_alternative<std::monostate>(value);
    const bool may_be_absent = def->fallback && std::holds_alternative<std::monostate>(*def->fallback);
    if (absent ? !may_be_absent : !fits(value, def->kind))
      throw TypeError(op.name + ": " + name + " is " + to_string(value) + ", needed " + kind_name(def->kind));
  }
  for (const AttrDef& def : op.attributes) {
    if (attrs.find(def.name)) continue;
    if (!def.fallback) throw TypeError(op.name + ": attribute '" + def.name + "' is not given, needed " + kind_name(def.kind));
    attrs.set(def.name, *def.fallback);
  }
}

void check_operands(const OpDef& op, const std::vector<ValueId>& inputs) {
  const bool variadic = !op.operands.empty() && op.operands.back().need == Need::variadic;
  const size_t fixed = op.operands.size() - (variadic ? 1 : 0);
  if (inputs.size() > fixed && !variadic)
    throw TypeError(op.name + ": got " + std::to_string(inputs.size()) + " operands, takes at most " + std::to_string(fixed));
  for (size_t i = 0; i < fixed; ++i) {
    const bool given = i < inputs.size() && inputs[i] != no_value;
    if (!given && op.operands[i].need == Need::required)
      throw TypeError(op.name + ": operand '" + op.operands[i].name + "' is not given");
  }
  for (size_t i = fixed; i < inputs.size(); ++i)
    if (inputs[i] == no_value) throw TypeError(op.name + ": entry " + std::to_string(i - fixed) + " of " + op.operands[fixed].name + " is not given");
}

Device common_device(const OpDef& op, const CallTypes& call) {
  const TensorType* first = nullptr;
  size_t first_index = 0;
  const auto operand_name = [&](size_t i) {
    return op.operands[std::min(i, op.operands.size() - 1)].name;
  };
  for (size_t i = 0; i < call.inputs.size(); ++i) {
    const TensorType* type = call.inputs[i];
    if (!type || type->is_number || (type->shape.empty() && type->device.kind == DeviceKind::cpu)) continue;
    if (!first) {
      first = type;
      first_index = i;
    } else if (first->device != type->device) {
      throw TypeError(op.name + ": " + operand_name(first_index) + " is on " + to_string(first->device) + ", " + operand_name(i) +
                      " is on " + to_string(type->device) + "; all operands must be on one device");
    }
  }
  if (first) return first->device;
  for (const TensorType* type : call.inputs)
    if (type) return type->device;
  return {};
}

}  // namespace

std::vector<TensorType> Builder::infer(const OpDef& op, const std::vector<ValueId>& inputs, Attributes& attrs) const {
  check_operands(op, inputs);
  complete_attributes(op, attrs);
  CallTypes call{op, {}, attrs};
  bool requires_grad = false;
  for (ValueId id : inputs) {
    call.inputs.push_back(id == no_value ? nullptr : &trace_.type(id));
    requires_grad |= id != no_value && trace_.type(id).requires_grad;
  }
  while (call.inputs.size() < op.operands.size()) {
    if (op.operands[call.inputs.size()].need == Need::variadic) break;
    call.inputs.push_back(nullptr);
  }
  const Device device = common_device(op, call);
  auto types = op.shape(call);
  const bool differentiable = !std::holds_alternative<NotDifferentiable>(op.gradient);
  for (TensorType& type : types) {
    if (!call.inputs.empty()) type.device = device;
    type.requires_grad = requires_grad && differentiable && is_float(type.dtype);
  }
  return types;
}

std::vector<ValueId> Builder::emit(std::string_view name, std::vector<ValueId> inputs, Attributes attrs) {
  const OpDef& op = require_op(name);
  auto types = infer(op, inputs, attrs);
  const bool variadic = !op.operands.empty() && op.operands.back().need == Need::variadic;
  if (!variadic) inputs.resize(op.operands.size(), no_value);
  Node node;
  node.op = &op;
  node.inputs = std::move(inputs);
  node.attrs = std::move(attrs);
  for (TensorType& type : types) node.outputs.push_back(trace_.add_value(std::move(type)));
  auto outputs = node.outputs;
  trace_.nodes.push_back(std::move(node));
  return outputs;
}

ValueId Builder::emit1(std::string_view op, std::vector<ValueId> inputs, Attributes attrs) {
  return emit(op, std::move(inputs), std::move(attrs)).at(0);
}

ValueId Builder::full(const Dims& shape, double value, DType dtype) {
  return emit1("full", {}, {{"shape", shape}, {"value", value}, {"dtype", dtype}});
}

ValueId Builder::zeros_like(ValueId x) {
  const TensorType like = type(x);
  Attributes attrs = {{"shape", like.shape}, {"value", 0.0}, {"dtype", like.dtype}};
  if (like.device.kind != DeviceKind::cpu) attrs.set("device", to_string(like.device));
  return emit1("full", {}, std::move(attrs));
}

namespace {
DType number_dtype(const TensorType& type) { return is_float(type.dtype) ? type.dtype : DType::f32; }
}  // namespace

ValueId Builder::add(ValueId x, double value) { return add(x, number(value, number_dtype(type(x)))); }
ValueId Builder::mul(ValueId x, double value) { return mul(x, number(value, number_dtype(type(x)))); }

ValueId Builder::convert(ValueId x, DType dtype) {
  return type(x).dtype == dtype ? x : emit1("convert", {x}, {{"dtype", dtype}});
}

ValueId Builder::reshape(ValueId x, const Dims& shape) {
  return type(x).shape == shape ? x : emit1("reshape", {x}, {{"shape", shape}});
}

ValueId Builder::expand(ValueId x, const Dims& shape) {
  return type(x).shape == shape ? x : emit1("broadcast_to", {x}, {{"shape", shape}});
}

ValueId Builder::permute(ValueId x, const Dims& dims) {
  bool identity = true;
  for (size_t i = 0; i < dims.size(); ++i) identity &= dims[i] == static_cast<int64_t>(i);
  return identity ? x : emit1("permute", {x}, {{"dims", dims}});
}

ValueId Builder::transpose(ValueId x, int64_t a, int64_t b) {
  const int64_t rank = type(x).rank();
  if (a < 0) a += rank;
  if (b < 0) b += rank;
  Dims dims(static_cast<size_t>(rank));
  for (int64_t i = 0; i < rank; ++i) dims[static_cast<size_t>(i)] = i;
  std::swap(dims.at(static_cast<size_t>(a)), dims.at(static_cast<size_t>(b)));
  return permute(x, dims);
}

ValueId Builder::slice(ValueId x, int64_t dim, int64_t begin, int64_t end, int64_t step) {
  return emit1("slice", {x}, {{"dim", dim}, {"begin", begin}, {"end", end}, {"step", step}});
}

ValueId Builder::unsqueeze(ValueId x, int64_t dim) {
  Dims shape = type(x).shape;
  if (dim < 0) dim += static_cast<int64_t>(shape.size()) + 1;
  shape.insert(shape.begin() + dim, 1);
  return reshape(x, shape);
}

ValueId Builder::sum(ValueId x, const Dims& dims, bool keepdim) { return emit1("sum", {x}, {{"dims", dims}, {"keepdim", keepdim}}); }
ValueId Builder::amax(ValueId x, const Dims& dims, bool keepdim) {
  return emit1("amax", {x}, {{"dims", dims}, {"keepdim", keepdim}});
}
ValueId Builder::matmul(ValueId a, ValueId b) { return emit1("matmul", {a, b}); }

ValueId Builder::sum_to(ValueId x, const Dims& shape, DType dtype) {
  const Dims& from = type(x).shape;
  if (from != shape) {
    const size_t added = from.size() - shape.size();
    Dims dims;
    for (size_t i = 0; i < from.size(); ++i)
      if (i < added || (shape[i - added] == 1 && from[i] != 1)) dims.push_back(static_cast<int64_t>(i));
    if (!dims.empty()) x = sum(x, dims, true);
    x = reshape(x, shape);
  }
  return convert(x, dtype);
}

std::optional<Dims> broadcast_shapes(const Dims& a, const Dims& b) {
  Dims out(std::max(a.size(), b.size()));
  for (size_t i = 0; i < out.size(); ++i) {
    const int64_t x = i < a.size() ? a[a.size() - 1 - i] : 1;
    const int64_t y = i < b.size() ? b[b.size() - 1 - i] : 1;
    if (x != y && x != 1 && y != 1) return std::nullopt;
    out[out.size() - 1 - i] = x == 1 ? y : x;
  }
  return out;
}

DType promoted_dtype(std::span<const TensorType* const> operands) {
  // Within PyTorch's rule: 0 = bool, 1 = integer, 2 = float; tensors with dims, then 0-dim tensors, then numbers.
  const auto category = [](DType dtype) { return is_float(dtype) ? 2 : dtype == DType::boolean ? 0 : 1; };
  std::optional<DType> level[3];
  for (const TensorType* type : operands) {
    if (!type) continue;
    auto& slot = level[type->is_number ? 2 : type->shape.empty() ? 1 : 0];
    slot = slot ? promote_dtypes(*slot, type->dtype) : type->dtype;
  }
  std::optional<DType> result;
  for (const auto& candidate : level) {
    if (!candidate) continue;
    if (!result)
      result = candidate;
    else if (category(*candidate) > category(*result))
      result = *candidate;
  }
  FULMEN_CHECK(result.has_value());
  return *result;
}

}  // namespace fulmen
