// The body of a fusion -> expressions over loop axes (expression.h). What cannot be one loop nest gives a reason.
#include <cmath>
#include <limits>
#include <map>
#include <string>
#include <utility>

#include "core/half.h"
#include "core/philox.h"
#include "executors/cpu/tile/expression.h"
#include "ops/axes.h"
#include "ops/builder.h"
#include "ops/pointwise_entry.h"

namespace fulmen::cpu::tile {

using pointwise::Kind;

const PointwiseEntry* find_pointwise(std::string_view name) {
  static constexpr PointwiseEntry entries[] = {
#define FULMEN_ROW(name, body, operands, kind, attributes) {#name, Op::name, operands, Kind::kind, attributes},
      FULMEN_POINTWISE_OPS(FULMEN_ROW)
#undef FULMEN_ROW
  };
  static const std::map<std::string_view, const PointwiseEntry*> index = [] {
    std::map<std::string_view, const PointwiseEntry*> map;
    for (const PointwiseEntry& entry : entries) map.emplace(entry.name, &entry);
    return map;
  }();
  const auto found = index.find(name);
  return found == index.end() ? nullptr : found->second;
}

namespace {

struct Unsupported {
  std::string reason;
};
[[noreturn]] void refuse(const Node& node, const std::string& reason) { throw Unsupported{node.op->name + ": " + reason}; }

// A value of the body: a view of an input's memory that nothing has read yet, or an expression.
struct Computed {
  int view = -1;
  int expression = -1;
  AxisDims dims;
  DType dtype = DType::f32;
};

class Analyser {
 public:
  explicit Analyser(const Trace& body) : body_(body), values_(body.values.size()) {}

  Analysis run() {
    for (size_t i = 0; i < body_.inputs.size(); ++i) {
      if (body_.inputs[i] == no_value) continue;
      const TensorType& type = body_.type(body_.inputs[i]);
      Computed& value = values_[static_cast<size_t>(body_.inputs[i])];
      value.dtype = type.dtype;
      value.view = add_view({static_cast<int>(i), type.dtype, 0, type.shape, type.strides, {}});
    }
    for (const Node& node : body_.nodes) values_[static_cast<size_t>(node.outputs[0])] = visit(node);
    for (size_t i = 0; i < body_.outputs.size(); ++i) add_output(static_cast<int>(i), body_.outputs[i]);
    for (Expression& e : result_.expressions) {
      e.axes = result_.space.resolve(e.axes);
      e.reduced_axes = result_.space.resolve(e.reduced_axes);
    }
    return std::move(result_);
  }

 private:
  int add(Expression e) {
    result_.expressions.push_back(std::move(e));
    return static_cast<int>(result_.expressions.size()) - 1;
  }
  Expression& at(int i) { return result_.expressions[static_cast<size_t>(i)]; }
  int add_view(MemoryView view) {
    pending_views_.push_back(std::move(view));
    return static_cast<int>(pending_views_.size()) - 1;
  }

  static std::vector<int> flat_axes(const AxisDims& dims) {
    std::vector<int> axes;
    for (const AxisDim& dim : dims) axes.insert(axes.end(), dim.axes.begin(), dim.axes.end());
    return axes;
  }

  // Reads a view: its moving dims get axes of their own.
  Computed& loaded(ValueId id) {
    Computed& value = values_[static_cast<size_t>(id)];
    if (value.expression >= 0) return value;
    MemoryView view = pending_views_[static_cast<size_t>(value.view)];
    for (size_t d = 0; d < view.shape.size(); ++d) {
      AxisDim dim{view.shape[d], {}};
      if (view.strides[d] != 0) result_.space.give_axis(dim);
      view.dims.push_back(dim);
    }
    value.dims = view.dims;
    Expression e{.code = Code::load, .domain = domain_of(view.dtype), .dtype = view.dtype};
    e.axes = flat_axes(view.dims);
    e.view = static_cast<int>(result_.views.size());
    result_.views.push_back(std::move(view));
    value.expression = add(std::move(e));
    return value;
  }

  int constant(double number, Domain domain) {
    Expression e{.code = Code::constant, .domain = domain};
    e.number = number;
    e.integer = domain != Domain::i64 ? 0
                : std::isinf(number) ? (number > 0 ? std::numeric_limits<int64_t>::max() : std::numeric_limits<int64_t>::min())
                                     : static_cast<int64_t>(number);
    return add(std::move(e));
  }

  int pointwise_expression(Op op, std::vector<int> args, int operands, Domain domain) {
    Expression e{.code = Code::pointwise, .op = op, .domain = domain, .args = std::move(args), .operands = operands};
    for (int i = 0; i < operands; ++i)
      if (e.axes.size() < at(e.args[static_cast<size_t>(i)]).axes.size()) e.axes = at(e.args[static_cast<size_t>(i)]).axes;
    return add(std::move(e));
  }

  int in_domain(int expression, Domain domain) {
    const Domain from = at(expression).domain;
    if (from == domain) return expression;
    Expression e;
    if (at(expression).code == Code::load && !result_.views[static_cast<size_t>(at(expression).view)].is_draw) {  // memory is read in any domain
      e = at(expression);
      e.domain = domain;
    } else if (at(expression).code == Code::constant) {
      return constant(from == Domain::i64 ? static_cast<double>(at(expression).integer) : at(expression).number, domain);
    } else {
      e = {.code = Code::convert, .domain = domain, .args = {expression}};
      e.axes = at(expression).axes;
    }
    return add(std::move(e));
  }

  int is_not_zero(int expression) {
    const Domain domain = at(expression).domain;
    const int zero = constant(0.0, domain);
    return pointwise_expression(Op::ne, {expression, zero}, 2, Domain::f32);
  }

  // The value as registers of `dtype`'s domain hold it, converted as op convert does.
  int as_dtype(const Computed& value, DType dtype) {
    if (dtype == value.dtype) return value.expression;
    if (dtype == DType::boolean) return is_not_zero(value.expression);
    int e = in_domain(value.expression, domain_of(dtype));
    if (is_integer(dtype) && dtype != DType::i64) e = wrapped(e, dtype);
    return e;
  }
  int wrapped(int expression, DType dtype) {
    Expression e{.code = Code::wrap, .domain = Domain::i64, .dtype = dtype, .args = {expression}};
    e.axes = at(expression).axes;
    return add(std::move(e));
  }
  // A 16-bit value as memory would hold it: comparisons must not see more digits than an equal value read back.
  int rounded(const Computed& value) {
    const Expression& source = at(value.expression);
    if (!is_half(value.dtype) || (source.code == Code::load && source.dtype == value.dtype)) return value.expression;
    Expression e{.code = Code::round, .domain = Domain::f32, .dtype = value.dtype, .args = {value.expression}};
    e.axes = at(value.expression).axes;
    return add(std::move(e));
  }

  // Dims of a broadcast result; dims that meet run along the same axes.
  AxisDims broadcast(const Node& node, const Dims& shape) {
    AxisDims result(shape.size());
    for (size_t d = 0; d < shape.size(); ++d) result[d].size = shape[d];
    for (ValueId id : node.inputs) {
      const AxisDims& dims = values_[static_cast<size_t>(id)].dims;
      for (size_t k = 0; k < dims.size(); ++k) {
        AxisDim& to = result[shape.size() - dims.size() + k];
        if (dims[k].axes.empty()) continue;
        if (to.axes.empty()) to.axes = dims[k].axes;
        else if (!result_.space.unify(to.axes, dims[k].axes)) refuse(node, "its operands' dims split differently");
      }
    }
    return result;
  }

  Computed pointwise_node(const Node& node, const PointwiseEntry& entry) {
    const TensorType& type = body_.type(node.outputs[0]);
    std::vector<const TensorType*> types;
    for (ValueId id : node.inputs) {
      if (id == no_value) refuse(node, "an operand is absent");
      loaded(id);
      types.push_back(&body_.type(id));
    }
    if (static_cast<int>(node.inputs.size()) != entry.operands) refuse(node, "it has another number of operands");
    Computed result;
    result.dtype = type.dtype;
    result.dims = broadcast(node, type.shape);
    if (entry.kind == Kind::number && type.dtype == DType::boolean && entry.op != Op::mul && entry.op != Op::maximum && entry.op != Op::minimum)
      refuse(node, "its result is bool");

    Domain domain = domain_of(type.dtype);
    DType work = type.dtype;
    if (entry.kind == Kind::comparison) work = promoted_dtype(types), domain = domain_of(work);
    if (entry.kind == Kind::logical) domain = Domain::f32;
    std::vector<int> args;
    for (size_t i = 0; i < node.inputs.size(); ++i) {
      const Computed& operand = values_[static_cast<size_t>(node.inputs[i])];
      if (entry.kind == Kind::logical)
        args.push_back(domain_of(operand.dtype) == Domain::f32 ? operand.expression : is_not_zero(operand.expression));
      else if (entry.kind == Kind::select && i == 0)
        args.push_back(operand.expression);
      else if (entry.kind == Kind::comparison)
        args.push_back(in_domain(rounded(operand), domain));
      else
        args.push_back(in_domain(operand.expression, domain));
    }
    if (const int simple = constant_power(node, entry, args); simple >= 0) {
      result.expression = simple;
      return result;
    }
    const int operands = static_cast<int>(args.size());
    add_attributes(node, entry, domain, args);
    const bool is_truth = entry.kind == Kind::comparison || entry.kind == Kind::logical;
    if (!kernel_table(domain, Isa::generic).pointwise[static_cast<int>(entry.op)][0])
      refuse(node, "there is no kernel for " + std::string(dtype_name(work)));
    result.expression = pointwise_expression(entry.op, args, operands, is_truth ? Domain::f32 : domain);
    at(result.expression).axes = flat_axes(result.dims);
    if (is_integer(type.dtype) && type.dtype != DType::i64) result.expression = wrapped(result.expression, type.dtype);
    return result;
  }

  void add_attributes(const Node& node, const PointwiseEntry& entry, Domain domain, std::vector<int>& args) {
    std::string_view names = entry.attributes;
    while (!names.empty()) {
      const std::string name(names.substr(0, names.find(' ')));
      names.remove_prefix(std::min(names.size(), name.size() + 1));
      double value = name == "min" ? -std::numeric_limits<double>::infinity() : std::numeric_limits<double>::infinity();
      if (node.attrs.has(name)) value = node.attrs.get_float(name);
      else if (name != "min" && name != "max") refuse(node, "attribute " + name + " is none");
      args.push_back(constant(value, domain));
    }
  }

  // x^2, x^3, 1/x and roots instead of the general power, which is slow.
  int constant_power(const Node&, const PointwiseEntry& entry, const std::vector<int>& args) {
    if (entry.op != Op::pow || at(args[1]).code != Code::constant || at(args[1]).domain == Domain::i64) return -1;
    const double power = at(args[1]).number;
    const Domain domain = at(args[0]).domain;
    if (power == 1.0) return args[0];
    if (power == 2.0) return pointwise_expression(Op::square, {args[0]}, 1, domain);
    if (power == 3.0) return pointwise_expression(Op::mul, {pointwise_expression(Op::square, {args[0]}, 1, domain), args[0]}, 2, domain);
    if (power == -1.0) return pointwise_expression(Op::reciprocal, {args[0]}, 1, domain);
    return -1;
  }

  Computed reduction_node(const Node& node, Fold fold) {
    Computed x = loaded(node.inputs[0]);
    const TensorType& type = body_.type(node.outputs[0]);
    const TensorType& from = body_.type(node.inputs[0]);
    Computed result;
    result.dtype = type.dtype;
    std::vector<bool> is_reduced(x.dims.size());
    for (int64_t dim : accepted_dims(node.attrs.get_dims("dims"), from.rank())) is_reduced[static_cast<size_t>(dim)] = true;
    const bool keepdim = node.attrs.get_bool("keepdim");
    std::vector<int> reduced;
    for (size_t d = 0; d < x.dims.size(); ++d) {
      if (!is_reduced[d]) {
        result.dims.push_back(x.dims[d]);
        continue;
      }
      result_.space.give_axis(x.dims[d]);
      reduced.insert(reduced.end(), x.dims[d].axes.begin(), x.dims[d].axes.end());
      if (keepdim) result.dims.push_back({1, {}});
    }
    values_[static_cast<size_t>(node.inputs[0])].dims = x.dims;
    if (fold == Fold::sum && type.dtype == DType::boolean) refuse(node, "its result is bool");
    x.expression = fold == Fold::sum ? as_dtype(x, type.dtype) : x.expression;
    if (reduced.empty()) {
      result.expression = x.expression;
      return result;
    }
    Expression e{.code = Code::reduce, .fold = fold, .domain = domain_of(type.dtype), .args = {x.expression}};
    e.axes = flat_axes(result.dims);
    e.reduced_axes = std::move(reduced);
    const int operand = x.expression;
    // A dim that was the same all along has an axis now; the operand must be known to run along it.
    at(operand).axes = flat_axes(x.dims);
    result.expression = add(std::move(e));
    return result;
  }

  // A view of memory that isn't there: positions instead of addresses.
  Computed draw_node(const Node& node) {
    const Computed& seed = values_[static_cast<size_t>(node.inputs[0])];
    if (seed.view < 0) refuse(node, "its seed is computed in the group");
    const MemoryView& from = pending_views_[static_cast<size_t>(seed.view)];
    const TensorType& type = body_.type(node.outputs[0]);
    MemoryView view{from.index, DType::boolean, 0, type.shape, contiguous_strides(type.shape), {}};
    view.is_draw = true;
    view.seed_offset = from.offset;
    view.seed_stride = from.strides[0];
    view.draw_offset = static_cast<uint64_t>(node.attrs.get_int("offset"));
    view.threshold = dropout_threshold(node.attrs.get_float("p"));
    Computed result;
    result.dtype = DType::boolean;
    result.view = add_view(std::move(view));
    return result;
  }

  // reshape, permute, broadcast_to and slice of memory change the view; of a computed value, its dims.
  Computed view_node(const Node& node) {
    const std::string& op = node.op->name;
    const Computed x = values_[static_cast<size_t>(node.inputs[0])];
    const TensorType& type = body_.type(node.outputs[0]);
    if (x.expression < 0) {
      MemoryView view = pending_views_[static_cast<size_t>(x.view)];
      if (view_of(node, view, type.shape)) {
        Computed result;
        result.dtype = x.dtype;
        result.view = add_view(std::move(view));
        return result;
      }
    }
    Computed result = loaded(node.inputs[0]);
    result.view = -1;
    if (op == "reshape") {
      auto dims = result_.space.regroup(result.dims, type.shape);
      if (!dims) refuse(node, "its dims split unevenly");
      result.dims = *dims;
    } else if (op == "permute") {
      const Dims& order = node.attrs.get_dims("dims");
      const AxisDims from = result.dims;
      for (size_t d = 0; d < order.size(); ++d) result.dims[d] = from[static_cast<size_t>(order[d] < 0 ? order[d] + static_cast<int64_t>(order.size()) : order[d])];
    } else if (op == "broadcast_to") {
      AxisDims dims(type.shape.size());
      const size_t added = dims.size() - result.dims.size();
      for (size_t d = 0; d < dims.size(); ++d) {
        dims[d].size = type.shape[d];
        if (d >= added && result.dims[d - added].size == type.shape[d]) dims[d].axes = result.dims[d - added].axes;
      }
      result.dims = std::move(dims);
    } else if (op != "contiguous" && op != "detach") {
      refuse(node, "it is a slice of a computed value");
    }
    return result;
  }

  // Changes `view` to what the node makes of it; false if strides can't say it.
  static bool view_of(const Node& node, MemoryView& view, const Dims& shape) {
    const std::string& op = node.op->name;
    if (op == "contiguous" || op == "detach") return true;
    if (op == "permute") {
      const Dims& order = node.attrs.get_dims("dims");
      const Dims strides = view.strides;
      for (size_t d = 0; d < order.size(); ++d) view.strides[d] = strides[static_cast<size_t>(order[d] < 0 ? order[d] + static_cast<int64_t>(order.size()) : order[d])];
    } else if (op == "broadcast_to") {
      const size_t added = shape.size() - view.shape.size();
      Dims strides(shape.size(), 0);
      for (size_t d = added; d < shape.size(); ++d)
        if (view.shape[d - added] == shape[d]) strides[d] = view.strides[d - added];
      view.strides = strides;
    } else if (op == "slice") {
      const int64_t rank = static_cast<int64_t>(view.shape.size());
      const int64_t dim = node.attrs.get_int("dim");
      const size_t d = static_cast<size_t>(dim < 0 ? dim + rank : dim);
      int64_t begin = node.attrs.has("begin") ? node.attrs.get_int("begin") : 0;
      if (begin < 0) begin += view.shape[d];
      begin = std::max<int64_t>(0, std::min(begin, view.shape[d]));
      view.offset += begin * view.strides[d];
      view.strides[d] *= node.attrs.has("step") ? node.attrs.get_int("step") : 1;
    } else if (op == "reshape") {
      return reshape_view(view, shape);
    } else {
      return false;
    }
    view.shape = shape;
    return true;
  }

  // Strides of a reshape without a copy, if there are any: runs of old dims that are evenly spaced are cut anew.
  static bool reshape_view(MemoryView& view, const Dims& shape) {
    Dims old_shape, old_strides;
    for (size_t d = 0; d < view.shape.size(); ++d)
      if (view.shape[d] != 1) old_shape.push_back(view.shape[d]), old_strides.push_back(view.strides[d]);
    Dims strides(shape.size(), 0);
    size_t from = 0, to = 0;
    while (from < old_shape.size()) {
      int64_t have = old_shape[from], want = 1;
      size_t from_end = from + 1, to_end = to;
      while (to_end < shape.size() && want < have) want *= shape[to_end++];
      while (want != have) {
        if (want < have) {
          if (to_end == shape.size()) return false;
          want *= shape[to_end++];
        } else {
          if (from_end == old_shape.size()) return false;
          have *= old_shape[from_end++];
        }
      }
      for (size_t d = from; d + 1 < from_end; ++d)
        if (old_strides[d] != old_strides[d + 1] * old_shape[d + 1]) return false;
      int64_t stride = old_strides[from_end - 1];
      for (size_t d = to_end; d-- > to;) {
        if (shape[d] == 1) continue;
        strides[d] = stride;
        stride *= shape[d];
      }
      from = from_end;
      to = to_end;
    }
    view.strides = strides;
    view.shape = shape;
    return true;
  }

  Computed visit(const Node& node) {
    if (node.outputs.size() != 1 || node.outputs[0] == no_value) refuse(node, "it has several results");
    const TensorType& type = body_.type(node.outputs[0]);
    for (int64_t size : type.shape)
      if (size == 0) refuse(node, "its result is empty");
    const std::string& op = node.op->name;
    if (op == "full") {
      Computed result;
      result.dtype = type.dtype;
      for (int64_t size : type.shape) result.dims.push_back({size, {}});
      const AttrValue& value = *node.attrs.find("value");
      const Domain domain = domain_of(type.dtype);
      const double number = std::holds_alternative<bool>(value) ? (std::get<bool>(value) ? 1.0 : 0.0) : node.attrs.get_float("value");
      result.expression = constant(type.dtype == DType::boolean ? (number != 0.0 ? 1.0 : 0.0) : number, domain);
      if (domain == Domain::i64 && std::holds_alternative<int64_t>(value)) at(result.expression).integer = std::get<int64_t>(value);
      if (is_half(type.dtype)) at(result.expression).number = type.dtype == DType::bf16 ? static_cast<float>(bf16(static_cast<float>(number))) : static_cast<float>(f16(static_cast<float>(number)));
      if (is_integer(type.dtype) && type.dtype != DType::i64) result.expression = wrapped(result.expression, type.dtype);
      return result;
    }
    if (op == "convert") {
      Computed result = loaded(node.inputs[0]);
      result.view = -1;
      result.expression = as_dtype(result, type.dtype);
      result.dtype = type.dtype;
      return result;
    }
    if (op == "dropout_mask") return draw_node(node);
    if (op == "sum") return reduction_node(node, Fold::sum);
    if (op == "amax") return reduction_node(node, Fold::max);
    if (op == "amin") return reduction_node(node, Fold::min);
    if (op == "reshape" || op == "permute" || op == "broadcast_to" || op == "slice" || op == "contiguous" || op == "detach") return view_node(node);
    if (const PointwiseEntry* entry = find_pointwise(pointwise_body_name(op, node.attrs))) return pointwise_node(node, *entry);
    refuse(node, "the cpu executor doesn't fuse it");
  }

  void add_output(int index, ValueId id) {
    const TensorType& type = body_.type(id);
    Computed& value = loaded(id);
    MemoryView view{index, type.dtype, 0, type.shape, type.strides, {}};
    for (AxisDim& dim : value.dims) result_.space.give_axis(dim);
    view.dims = value.dims;
    result_.outputs.push_back(value.expression);
    result_.output_views.push_back(std::move(view));
  }

  const Trace& body_;
  std::vector<Computed> values_;
  std::vector<MemoryView> pending_views_;
  Analysis result_;
};

}  // namespace

std::variant<Analysis, std::string> analyse(const Trace& body) {
  try {
    return Analyser(body).run();
  } catch (const Unsupported& unsupported) {
    return unsupported.reason;
  }
}

}  // namespace fulmen::cpu::tile
