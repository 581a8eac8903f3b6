#include "ops/pointwise_entry.h"

#include <array>
#include <unordered_map>
#include <utility>

#include "ops/reference_loops.h"
#include "ops/rules/dims.h"

namespace fulmen {
namespace {

using pointwise::Kind;

// One body, callable on arguments in a row: tensor operands, then attributes.
struct Body {
  size_t operands = 0;
  Kind kind = Kind::number;
  std::vector<std::string> attributes;
  double (*on_doubles)(const double*) = nullptr;
  int64_t (*on_integers)(const int64_t*) = nullptr;  // null for bodies of floats only
};

template <class B, class T, size_t... I>
T call_body(const T* arguments, std::index_sequence<I...>) {
  return B::apply(arguments[I]...);
}
template <class B, class T, size_t N>
T apply_body(const T* arguments) {
  return call_body<B, T>(arguments, std::make_index_sequence<N>());
}

constexpr size_t word_count(std::string_view words) {
  size_t count = words.empty() ? 0 : 1;
  for (char c : words) count += c == ' ';
  return count;
}

std::vector<std::string> split(std::string_view words) {
  std::vector<std::string> out;
  while (!words.empty()) {
    const size_t end = words.find(' ');
    out.emplace_back(words.substr(0, end));
    words = end == std::string_view::npos ? std::string_view{} : words.substr(end + 1);
  }
  return out;
}

template <class B, size_t Operands, Kind kind, size_t Attrs>
Body make_body(std::string_view attributes) {
  Body body;
  body.operands = Operands;
  body.kind = kind;
  body.attributes = split(attributes);
  body.on_doubles = &apply_body<B, double, Operands + Attrs>;
  if constexpr (kind != Kind::floating) body.on_integers = &apply_body<B, int64_t, Operands + Attrs>;
  return body;
}

const std::unordered_map<std::string_view, Body>& bodies() {
  static const std::unordered_map<std::string_view, Body> map = {
#define FULMEN_BODY(op, body, operands, kind, attributes) \
  {#op, make_body<pointwise::body, operands, Kind::kind, word_count(attributes)>(attributes)},
      FULMEN_POINTWISE_OPS(FULMEN_BODY)
#undef FULMEN_BODY
  };
  return map;
}

const Body& body_of(std::string_view op, const Attributes& attrs) {
  const auto at = bodies().find(pointwise_body_name(op, attrs));
  FULMEN_CHECK(at != bodies().end());
  return at->second;
}

// An absent bound of clamp is the number that bounds nothing.
double float_attribute(const Attributes& attrs, const std::string& name) {
  if (attrs.has(name)) return attrs.get_float(name);
  FULMEN_CHECK(name == "min" || name == "max");
  const double infinite = std::numeric_limits<double>::infinity();
  return name == "min" ? -infinite : infinite;
}
int64_t integer_attribute(const Attributes& attrs, const std::string& name) {
  if (attrs.has(name)) return integer_of(attrs.get_float(name));
  FULMEN_CHECK(name == "min" || name == "max");
  return name == "min" ? std::numeric_limits<int64_t>::min() : std::numeric_limits<int64_t>::max();
}

void run_pointwise(std::string_view op, const ReferenceArgs& args) {
  const Body& body = body_of(op, args.attrs);
  HostTensor& out = args.outputs[0];
  std::vector<const Dims*> shapes;
  bool integers = body.on_integers != nullptr && (body.kind == Kind::comparison || body.kind == Kind::logical || !is_float(out.type.dtype));
  for (size_t i = 0; i < body.operands; ++i) {
    shapes.push_back(&args.inputs[i]->type.shape);
    integers = integers && !is_float(args.inputs[i]->type.dtype);
  }
  const size_t total = body.operands + body.attributes.size();
  std::array<double, 8> doubles{};
  std::array<int64_t, 8> whole{};
  for (size_t k = 0; k < body.attributes.size(); ++k) {
    if (integers)
      whole[body.operands + k] = integer_attribute(args.attrs, body.attributes[k]);
    else
      doubles[body.operands + k] = float_attribute(args.attrs, body.attributes[k]);
  }
  FULMEN_CHECK(total <= doubles.size());
  for_each_broadcast(out.type.shape, shapes, [&](int64_t linear, const std::vector<int64_t>& offsets) {
    if (integers) {
      for (size_t i = 0; i < body.operands; ++i) whole[i] = args.inputs[i]->i[static_cast<size_t>(offsets[i])];
      const int64_t value = body.on_integers(whole.data());
      if (is_float(out.type.dtype))
        out.f[static_cast<size_t>(linear)] = static_cast<double>(value);
      else
        out.i[static_cast<size_t>(linear)] = wrap_integer(value, out.type.dtype);
    } else {
      for (size_t i = 0; i < body.operands; ++i) doubles[i] = args.inputs[i]->at(offsets[i]);
      out.set(linear, body.on_doubles(doubles.data()));
    }
  });
}

std::vector<TensorType> infer_pointwise(const CallTypes& call, Kind kind) {
  const Dims shape = broadcast_all(call);
  if (kind == Kind::comparison || kind == Kind::logical) return {result_type(DType::boolean, shape)};
  const DType dtype = promoted_dtype(call.inputs);
  return {result_type(kind == Kind::floating ? float_result(dtype) : dtype, shape)};
}

OpDef make_pointwise(PointwiseSpec spec, size_t operands, std::variant<GradientRule, NotDifferentiable, ByDecomposition> gradient,
                     std::vector<Sample> good, std::vector<BadSample> bad) {
  std::vector<OperandDef> names;
  if (operands == 1)
    names = {{"x"}};
  else
    names = {{"a"}, {"b"}};
  return OpDef{{.name = spec.name},
               spec.doc,
               std::move(names),
               /*attributes=*/{},
               pointwise_shape(spec.kind),
               pointwise_reference(spec.name),
               std::move(gradient),
               spec.autocast,
               {std::move(good), std::move(bad)},
               std::move(spec.torch)};
}

}  // namespace

std::string_view pointwise_body_name(std::string_view op, const Attributes& attrs) {
  if (op == "gelu" && attrs.get_text("approximate") == "tanh") return "gelu_tanh";
  if (op == "gelu_grad" && attrs.get_text("approximate") == "tanh") return "gelu_tanh_grad";
  if (op == "div" && attrs.has("rounding")) return attrs.get_text("rounding") == "floor" ? "floor_divide" : "trunc_divide";
  const auto at = bodies().find(op);
  return at == bodies().end() ? std::string_view{} : at->first;
}

ShapeRule pointwise_shape(Kind kind) {
  return [kind](const CallTypes& call) { return infer_pointwise(call, kind); };
}

ShapeRule pointwise_shape_no_bool(Kind kind) {
  return [kind](const CallTypes& call) {
    auto types = infer_pointwise(call, kind);
    if (types[0].dtype == DType::boolean)
      call.type_error(operand_name(call.op, 0) + " is bool; needed a number, which bool isn't here: convert it, or use the logical ops");
    return types;
  };
}

Primitive pointwise_reference(std::string op) {
  return {[op = std::move(op)](const ReferenceArgs& args) { run_pointwise(op, args); }};
}

ValueId for_operand(Builder& b, const GradientArgs& args, size_t i, ValueId grad) {
  const TensorType& type = b.type(args.inputs[i]);
  const Dims shape = type.shape;
  const DType dtype = type.dtype;
  return b.sum_to(grad, shape, dtype);
}

GradientRule unary_gradient(UnarySlope slope) {
  return [slope = std::move(slope)](Builder& b, const GradientArgs& args) -> std::vector<ValueId> {
    if (!args.need[0] || args.output_grads[0] == no_value) return {no_value};
    return {for_operand(b, args, 0, slope(b, args.inputs[0], args.outputs[0], args.output_grads[0]))};
  };
}

GradientRule binary_gradient(BinarySlope for_a, BinarySlope for_b) {
  return [for_a = std::move(for_a), for_b = std::move(for_b)](Builder& b, const GradientArgs& args) -> std::vector<ValueId> {
    std::vector<ValueId> grads = {no_value, no_value};
    if (args.output_grads[0] == no_value) return grads;
    if (args.need[0]) grads[0] = for_operand(b, args, 0, for_a(b, args.inputs[0], args.inputs[1], args.outputs[0], args.output_grads[0]));
    if (args.need[1]) grads[1] = for_operand(b, args, 1, for_b(b, args.inputs[0], args.inputs[1], args.outputs[0], args.output_grads[0]));
    return grads;
  };
}

GradientRule zero_gradient() {
  return [](Builder&, const GradientArgs& args) { return std::vector<ValueId>(args.inputs.size(), no_value); };
}

std::vector<Sample> unary_samples(const std::string& domain, const Attributes& attrs) {
  return {
      {"plain", {"f32[3,5]!"}, attrs, domain},
      {"scalar", {"f32[]!"}, attrs, domain},
      {"empty", {"f32[0,4]!"}, attrs, domain},
      {"one", {"f32[1,1]!"}, attrs, domain},
      {"transposed", {"f32[7,3]{stride=1,7}!"}, attrs, domain},
      {"row_gap", {"f32[3,5]{stride=8,1}!"}, attrs, domain},
      {"expanded", {"f32[4,5]{stride=0,1}!"}, attrs, domain},
      {"spread", {"f32[2,3,5]{stride=60,2,8}!"}, attrs, domain},
      {"f64", {"f64[13]!"}, attrs, domain},
      {"bf16", {"bf16[2,37]!"}, attrs, domain},
      {"f16", {"f16[67]!"}, attrs, domain},
      {"i64", {"i64[3,3]"}, attrs, domain},
      {"u8", {"u8[5]"}, attrs, domain},
  };
}

std::vector<Sample> binary_samples(const std::string& domain, const Attributes& attrs, bool gradient) {
  const std::string mark = gradient ? "!" : "";
  return {
      {"plain", {"f32[3,5]" + mark, "f32[3,5]" + mark}, attrs, domain},
      {"scalar", {"f32[]" + mark, "f32[]" + mark}, attrs, domain},
      {"row", {"f32[4,7]" + mark, "f32[7]" + mark}, attrs, domain},
      {"column", {"f32[4,1]" + mark, "f32[4,7]" + mark}, attrs, domain},
      {"outer", {"f32[3,1,2]" + mark, "f32[5,1]" + mark}, attrs, domain},
      {"empty", {"f32[0,4]" + mark, "f32[1,4]" + mark}, attrs, domain},
      {"transposed", {"f32[5,3]{stride=1,5}" + mark, "f32[5,3]" + mark}, attrs, domain},
      {"expanded", {"f32[2,6]{stride=0,1}" + mark, "f32[2,6]{stride=9,1}" + mark}, attrs, domain},
      {"bf16", {"bf16[2,19]" + mark, "bf16[19]" + mark}, attrs, domain},
      {"mixed_floats", {"f16[5]" + mark, "f32[5]" + mark}, attrs, domain},
      {"halves", {"f16[3]" + mark, "bf16[3]" + mark}, attrs, domain},
      {"zero_dim_beside", {"bf16[2,3]" + mark, "f32[]" + mark}, attrs, domain},
      {"f64", {"f64[11]" + mark, "f64[11]" + mark}, attrs, domain},
      {"integers", {"i32[2,3]", "i64[3]"}, attrs, domain},
      {"bytes", {"u8[7]", "i8[7]"}, attrs, domain},
      {"integer_beside_float", {"i64[4]", "f32[4]" + mark}, attrs, domain},
  };
}

namespace {

BadSample no_broadcast(const Attributes& attrs = {}) {
  return {{"sizes_differ", {"f32[3,4]", "f32[2,4]"}, attrs},
          "ShapeError",
          "a is [3,4], b is [2,4]; sizes must be equal or 1, dim -2 has 3 and 2"};
}

}  // namespace

OpDef unary_op(PointwiseSpec spec, UnarySlope slope) { return unary_op(std::move(spec), unary_gradient(std::move(slope))); }

OpDef unary_op(PointwiseSpec spec, GradientRule rule) {
  auto samples = unary_samples(spec.domain);
  std::vector<BadSample> bad = {{{"two_operands", {"f32[2]", "f32[2]"}, {}}, "TypeError", "got 2 operands, takes at most 1"}};
  return make_pointwise(std::move(spec), 1, std::move(rule), std::move(samples), std::move(bad));
}

OpDef unary_op(PointwiseSpec spec, NotDifferentiable reason) {
  auto samples = unary_samples(spec.domain);
  std::vector<BadSample> bad = {{{"two_operands", {"f32[2]", "f32[2]"}, {}}, "TypeError", "got 2 operands, takes at most 1"}};
  return make_pointwise(std::move(spec), 1, std::move(reason), std::move(samples), std::move(bad));
}

OpDef binary_op(PointwiseSpec spec, std::variant<GradientRule, NotDifferentiable, ByDecomposition> gradient) {
  const bool differentiable = !std::holds_alternative<NotDifferentiable>(gradient);
  auto samples = binary_samples(spec.domain, {}, differentiable);
  return make_pointwise(std::move(spec), 2, std::move(gradient), std::move(samples), {no_broadcast()});
}

ValueId number_like(Builder& b, ValueId x, double value) { return b.number(value, b.type(x).dtype); }
ValueId one_minus(Builder& b, ValueId x) { return b.sub(number_like(b, x, 1.0), x); }
ValueId compare(Builder& b, std::string_view op, ValueId x, double value) {
  return b.emit1(op, {x, number_like(b, x, value)});
}

}  // namespace fulmen
