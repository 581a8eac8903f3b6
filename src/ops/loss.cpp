// Losses: nll_loss, mse_loss, l1_loss, smooth_l1_loss, huber_loss, binary_cross_entropy (also with logits), kl_div. Composites of
// pointwise ops and one sum, so that they fuse; 16-bit floats are computed in f32. cross_entropy has a file of its own.
#include <cmath>

#include "ops/axes.h"
#include "ops/families.h"
#include "ops/pointwise_entry.h"  // for_operand

namespace fulmen {

std::vector<OpDef> cross_entropy_ops();  // cross_entropy.cpp

namespace {

AttrDef reduction_attribute() { return {"reduction", AttrKind::text, std::string("mean")}; }

const std::string& checked_reduction(const CallTypes& call, bool batchmean = false) {
  const std::string& reduction = call.attrs.get_text("reduction");
  if (reduction != "mean" && reduction != "sum" && reduction != "none" && !(batchmean && reduction == "batchmean"))
    call.type_error("reduction is \"" + reduction + "\", needed \"mean\", \"sum\"" + (batchmean ? ", \"batchmean\"" : "") + " or \"none\"");
  return reduction;
}

DType pair_dtype(const CallTypes& call) {
  const TensorType* pair[] = {call.inputs[0], call.inputs[1]};
  return promoted_dtype(pair);
}

// x and target broadcast to each other, floats both.
std::vector<TensorType> pair_shape(const CallTypes& call) {
  need_float(call, 0);
  need_float(call, 1);
  const std::string& reduction = checked_reduction(call, call.op.name == "kl_div");
  const Dims shape = broadcast_some(call, {0, 1});
  return {contiguous_type(pair_dtype(call), reduction == "none" ? shape : Dims{})};
}

ValueId reduced(Builder& b, ValueId loss, const Attributes& attrs, DType dtype) {
  const std::string& reduction = attrs.get_text("reduction");
  const TensorType type = b.type(loss);
  if (reduction != "none") {
    double count = 1.0;
    if (reduction == "mean") count = static_cast<double>(type.element_count());
    if (reduction == "batchmean") count = type.rank() ? static_cast<double>(type.shape[0]) : 1.0;
    loss = b.sum(loss, {}, false);
    if (reduction != "sum") loss = b.div(loss, b.number(count, type.dtype));
  }
  return b.convert(loss, dtype);
}

struct Pair {
  ValueId x, target;
  DType dtype, result;
};
Pair wide_pair(Builder& b, const Node& node) {
  const TensorType* types[] = {&b.trace().type(node.inputs[0]), &b.trace().type(node.inputs[1])};
  const DType result = promoted_dtype(types), dtype = compute_dtype(result);
  return {b.convert(node.inputs[0], dtype), b.convert(node.inputs[1], dtype), dtype, result};
}

using PairBody = std::function<ValueId(Builder&, const Pair&, const Attributes&)>;

Samples pair_samples(const std::string& domain, Attributes attrs = {}) {
  const auto with = [&](const char* reduction) {
    Attributes all = attrs;
    all.set("reduction", std::string(reduction));
    return all;
  };
  return {{{"mean", {"f32[5,7]", "f32[5,7]"}, attrs, domain},
           {"sum", {"f32[5,7]", "f32[5,7]"}, with("sum"), domain},
           {"rows", {"f32[5,7]", "f32[5,7]"}, with("none"), domain},
           {"broadcast", {"f32[5,7]", "f32[7]"}, attrs, domain},
           {"scalar", {"f32[]", "f32[]"}, attrs, domain},
           {"nothing", {"f32[0,3]", "f32[0,3]"}, with("sum"), domain},
           {"strided", {"f32[5,7]{stride=1,5}", "f32[5,7]{stride=0,1}"}, attrs, domain},
           {"bf16", {"bf16[3,19]", "bf16[3,19]"}, attrs, domain},
           {"f64", {"f64[3,5]", "f64[3,5]"}, attrs, domain}},
          {{{"shapes", {"f32[5,7]", "f32[5]"}, attrs}, "ShapeError", "sizes must be equal or 1"},
           {{"integers", {"i64[5]", "f32[5]"}, attrs}, "TypeError", "x is i64, needed a float dtype"},
           {{"reduction", {"f32[5]", "f32[5]"}, with("avg")}, "TypeError", "reduction is \"avg\""}}};
}

OpDef pair_op(const std::string& name, const std::string& doc, std::vector<AttrDef> attributes, PairBody body, Samples samples,
              std::vector<std::string> torch) {
  attributes.insert(attributes.begin(), reduction_attribute());
  return {
      {.name = name},
      doc,
      /*operands=*/{{"x"}, {"target"}},
      std::move(attributes),
      /*shape=*/pair_shape,
      /*meaning=*/Decomposition{[body](Builder& b, const Node& node) -> std::vector<ValueId> {
        const Pair pair = wide_pair(b, node);
        return {reduced(b, body(b, pair, node.attrs), node.attrs, pair.result)};
      }},
      /*gradient=*/ByDecomposition{},
      /*autocast=*/Autocast::fp32,
      std::move(samples),
      std::move(torch),
  };
}

ValueId difference(Builder& b, const Pair& pair) { return b.sub(pair.x, pair.target); }

ValueId smooth_l1(Builder& b, const Pair& pair, const Attributes& attrs) {
  const double beta = attrs.get_float("beta");
  const ValueId d = difference(b, pair), size = b.emit1("abs", {d});
  if (beta == 0.0) return size;
  return b.where(b.emit1("lt", {size, b.number(beta, pair.dtype)}), b.mul(b.mul(d, d), 0.5 / beta), b.add(size, -0.5 * beta));
}

ValueId huber(Builder& b, const Pair& pair, const Attributes& attrs) {
  const double delta = attrs.get_float("delta");
  const ValueId d = difference(b, pair), size = b.emit1("abs", {d});
  return b.where(b.emit1("le", {size, b.number(delta, pair.dtype)}), b.mul(b.mul(d, d), 0.5), b.mul(b.add(size, -0.5 * delta), delta));
}

// target 0 contributes 0, whatever its logarithm
ValueId divergence(Builder& b, const Pair& pair, const Attributes& attrs) {
  if (attrs.get_bool("log_target")) return b.mul(b.exp(pair.target), b.sub(pair.target, pair.x));
  const ValueId zero = b.number(0.0, pair.dtype);
  const ValueId is_zero = b.emit1("eq", {pair.target, zero});
  const ValueId logarithm = b.log(b.where(is_zero, b.number(1.0, pair.dtype), pair.target));
  return b.sub(b.mul(pair.target, logarithm), b.mul(pair.target, pair.x));
}

OpDef nll_loss_op() {
  return {
      {.name = "nll_loss"},
      /*doc=*/
      "Negative log likelihood: x holds log probabilities, (classes), (batch, classes) or (batch, classes, ...), target class "
      "indices (x's shape without the classes). A row gives -weight[t] x[t]; rows at ignore_index count nothing; mean divides by "
      "the sum of weight[t].",
      /*operands=*/{{"x"}, {"target"}, {"weight", Need::optional}},
      /*attributes=*/{reduction_attribute(), {"ignore_index", AttrKind::integer, int64_t{-100}}},
      /*shape=*/[](const CallTypes& call) -> std::vector<TensorType> {
        need_float(call, 0);
        need_rank(call, 0, 1, 100);
        if (call[1].dtype != DType::i64 && call[1].dtype != DType::i32)
          call.type_error("target is " + text_of(call[1].dtype) + ", needed i32 or i64 class indices");
        Dims rows = call[0].shape;
        const size_t dim = rows.size() == 1 ? 0 : 1;
        const int64_t classes = rows[dim];
        rows.erase(rows.begin() + static_cast<ptrdiff_t>(dim));
        if (call[1].shape != rows)
          call.shape_error("x is " + to_string(call[0].shape) + ", target is " + to_string(call[1].shape) + "; class indices need " + to_string(rows));
        if (call.has(2) && call[2].shape != Dims{classes})
          call.shape_error("weight is " + to_string(call[2].shape) + ", needed " + to_string(Dims{classes}) + ", one a class");
        return {contiguous_type(call[0].dtype, checked_reduction(call) == "none" ? rows : Dims{})};
      },
      /*meaning=*/Decomposition{[](Builder& b, const Node& node) -> std::vector<ValueId> {
        const TensorType type = b.type(node.inputs[0]);
        const DType dtype = compute_dtype(type.dtype);
        const int64_t dim = type.rank() == 1 ? 0 : 1, classes = type.shape[static_cast<size_t>(dim)];
        const ValueId target = b.convert(node.inputs[1], DType::i64);
        const ValueId valid = b.emit1("ne", {target, b.number(static_cast<double>(node.attrs.get_int("ignore_index")), DType::i64)});
        const ValueId safe = b.where(valid, target, b.number(0.0, DType::i64));
        const ValueId zero = b.number(0.0, dtype);
        ValueId weights = b.number(1.0, dtype);
        if (node.inputs[2] != no_value)
          weights = b.convert(b.reshape(b.emit1("embedding", {b.reshape(node.inputs[2], {classes, 1}), safe}), b.type(target).shape), dtype);
        weights = b.where(valid, weights, zero);
        const ValueId picked = b.emit1("gather", {node.inputs[0], b.unsqueeze(safe, dim)}, {{"dim", dim}});
        const ValueId rows = b.where(valid, b.convert(b.reshape(picked, b.type(target).shape), dtype), zero);
        ValueId loss = b.neg(b.mul(rows, weights));
        const std::string& reduction = node.attrs.get_text("reduction");
        if (reduction != "none") loss = b.sum(loss, {}, false);
        if (reduction == "mean") loss = b.div(loss, b.sum(weights, {}, false));
        return {b.convert(loss, type.dtype)};
      }},
      /*gradient=*/ByDecomposition{},
      /*autocast=*/Autocast::fp32,
      /*samples=*/
      {{{"rows", {"f32[5,16]", "i64[5]", "none"}, {}},
        {"one_row", {"f32[16]", "i64[]", "none"}, {}},
        {"weighted", {"f32[5,16]", "i64[5]", "f32[16]"}, {}, "positive"},
        {"ignored", {"f32[11,16]", "i64[11]", "none"}, {{"ignore_index", int64_t{1}}}},
        {"images", {"f32[2,16,3]", "i64[2,3]", "none"}, {{"reduction", std::string("none")}}},
        {"bf16", {"bf16[5,19]", "i64[5]", "none"}, {}}},
       {{{"target_shape", {"f32[5,16]", "i64[4]", "none"}, {}}, "ShapeError", "class indices need [5]"},
        {{"target_dtype", {"f32[5,16]", "f32[5]", "none"}, {}}, "TypeError", "target is f32"}}},
      /*torch=*/{"torch.nn.functional.nll_loss"},
  };
}

// x and target of one shape, weights that broadcast to it.
std::vector<TensorType> weighted_pair_shape(const CallTypes& call) {
  const size_t operands = call.op.operands.size();
  for (size_t i = 0; i < operands; ++i)
    if (call.has(i)) need_float(call, i);
  if (call[0].shape != call[1].shape)
    call.shape_error("x is " + to_string(call[0].shape) + ", target is " + to_string(call[1].shape) + "; needed equal");
  for (size_t i = 2; i < operands; ++i)
    if (call.has(i) && broadcast_shapes(call[0].shape, call[i].shape) != call[0].shape)
      call.shape_error(operand_name(call.op, i) + " is " + to_string(call[i].shape) + ", must broadcast to x, " + to_string(call[0].shape));
  return {contiguous_type(pair_dtype(call), checked_reduction(call) == "none" ? call[0].shape : Dims{})};
}

ValueId logarithm_from_minus_100(Builder& b, ValueId x) { return b.emit1("clamp", {b.log(x)}, {{"min", -100.0}}); }

// -(t log x + (1 - t) log(1 - x)). Its gradient has a rule: that of the logarithms is infinite at 0, where their bound holds.
OpDef probability_op() {
  return {
      {.name = "binary_cross_entropy"},
      /*doc=*/
      "-(t log(x) + (1 - t) log(1 - x)), times weight; t is target, in x's shape, x a probability. Logarithms are at least -100, and "
      "the gradient of x is (x - t) / max(x (1 - x), 1e-12). weight broadcasts to x.",
      /*operands=*/{{"x"}, {"target"}, {"weight", Need::optional}},
      /*attributes=*/{reduction_attribute()},
      /*shape=*/weighted_pair_shape,
      /*meaning=*/Decomposition{[](Builder& b, const Node& node) -> std::vector<ValueId> {
        const Pair pair = wide_pair(b, node);
        const ValueId one = b.number(1.0, pair.dtype);
        const ValueId of_true = b.mul(pair.target, logarithm_from_minus_100(b, pair.x));
        const ValueId of_false = b.mul(b.sub(one, pair.target), logarithm_from_minus_100(b, b.sub(one, pair.x)));
        ValueId loss = b.neg(b.add(of_true, of_false));
        if (node.inputs[2] != no_value) loss = b.mul(loss, b.convert(node.inputs[2], pair.dtype));
        return {reduced(b, loss, node.attrs, pair.result)};
      }},
      /*gradient=*/GradientRule{[](Builder& b, const GradientArgs& args) -> std::vector<ValueId> {
        std::vector<ValueId> grads(3, no_value);
        if (args.output_grads[0] == no_value) return grads;
        if (args.need[2])
          throw UnsupportedError("binary_cross_entropy: weight wants a gradient, which isn't supported; needed a weight without one");
        const Pair pair = wide_pair(b, args.node);
        ValueId dy = b.convert(args.output_grads[0], pair.dtype);
        if (args.inputs[2] != no_value) dy = b.mul(dy, b.convert(args.inputs[2], pair.dtype));
        if (args.node.attrs.get_text("reduction") == "mean")
          dy = b.div(dy, b.number(static_cast<double>(b.type(args.inputs[0]).element_count()), pair.dtype));
        const ValueId one = b.number(1.0, pair.dtype), other = b.sub(one, pair.x);
        if (args.need[0]) {
          const ValueId spread = b.emit1("clamp", {b.mul(pair.x, other)}, {{"min", 1e-12}});
          grads[0] = for_operand(b, args, 0, b.mul(dy, b.div(difference(b, pair), spread)));
        }
        if (args.need[1])
          grads[1] = for_operand(b, args, 1, b.mul(dy, b.sub(b.log(other), b.log(pair.x))));
        return grads;
      }},
      /*autocast=*/Autocast::fp32,
      /*samples=*/
      {{{"mean", {"f32[5,7]!", "f32[5,7]!", "none"}, {}, "unit"},
        {"sum", {"f32[5,7]!", "f32[5,7]", "none"}, {{"reduction", std::string("sum")}}, "unit"},
        {"weighted", {"f32[5,7]!", "f32[5,7]", "f32[7]"}, {{"reduction", std::string("none")}}, "unit"},
        {"strided", {"f32[5,7]{stride=1,5}!", "f32[5,7]{stride=0,1}!", "none"}, {}, "unit"},
        {"nothing", {"f32[0,3]!", "f32[0,3]", "none"}, {{"reduction", std::string("sum")}}},
        {"bf16", {"bf16[3,19]!", "bf16[3,19]!", "none"}, {}, "unit"},
        {"f64", {"f64[3,5]!", "f64[3,5]!", "none"}, {}, "unit"}},
       {{{"shapes", {"f32[5,7]", "f32[7]", "none"}, {}}, "ShapeError", "x is [5,7], target is [7]; needed equal"},
        {{"weight_shape", {"f32[5,7]", "f32[5,7]", "f32[5]"}, {}}, "ShapeError", "weight is [5], must broadcast to x"},
        {{"integers", {"f32[5]", "i64[5]", "none"}, {}}, "TypeError", "target is i64, needed a float dtype"}}},
      /*torch=*/{},
  };
}

OpDef binary_op() {
  return {
      {.name = "binary_cross_entropy_with_logits"},
      /*doc=*/
      "(1 - t) x - (1 + (pos_weight - 1) t) log(sigmoid(x)), times weight; t is target, in x's shape. weight and pos_weight "
      "broadcast to it.",
      /*operands=*/{{"x"}, {"target"}, {"weight", Need::optional}, {"pos_weight", Need::optional}},
      /*attributes=*/{reduction_attribute()},
      /*shape=*/weighted_pair_shape,
      /*meaning=*/Decomposition{[](Builder& b, const Node& node) -> std::vector<ValueId> {
        const Pair pair = wide_pair(b, node);
        const ValueId one = b.number(1.0, pair.dtype);
        ValueId logarithm = b.emit1("log_sigmoid", {pair.x});
        if (node.inputs[3] != no_value) {
          const ValueId extra = b.sub(b.convert(node.inputs[3], pair.dtype), one);
          logarithm = b.mul(logarithm, b.add(b.mul(extra, pair.target), one));
        }
        ValueId loss = b.sub(b.mul(b.sub(one, pair.target), pair.x), logarithm);
        if (node.inputs[2] != no_value) loss = b.mul(loss, b.convert(node.inputs[2], pair.dtype));
        return {reduced(b, loss, node.attrs, pair.result)};
      }},
      /*gradient=*/ByDecomposition{},
      /*autocast=*/Autocast::fp32,
      /*samples=*/
      {{{"mean", {"f32[5,7]", "f32[5,7]", "none", "none"}, {}},
        {"weighted", {"f32[5,7]", "f32[5,7]", "f32[7]", "none"}, {}},
        {"positive_weighted", {"f32[5,7]", "f32[5,7]", "none", "f32[7]"}, {{"reduction", std::string("none")}}},
        {"bf16", {"bf16[3,19]", "bf16[3,19]", "none", "none"}, {}}},
       {{{"shapes", {"f32[5,7]", "f32[7]", "none", "none"}, {}}, "ShapeError", "x is [5,7], target is [7]; needed equal"},
        {{"weight_shape", {"f32[5,7]", "f32[5,7]", "f32[5]", "none"}, {}}, "ShapeError", "weight is [5], must broadcast to x"}}},
      /*torch=*/{"torch.nn.functional.binary_cross_entropy_with_logits"},
  };
}

}  // namespace

std::vector<OpDef> loss_ops() {
  std::vector<OpDef> ops = cross_entropy_ops();
  ops.push_back(nll_loss_op());
  ops.push_back(pair_op("mse_loss", "(x - target)^2, reduced: none, sum or mean. The operands broadcast.", {},
                        [](Builder& b, const Pair& pair, const Attributes&) {
                          const ValueId d = difference(b, pair);
                          return b.mul(d, d);
                        },
                        pair_samples("normal"), {"torch.nn.functional.mse_loss"}));
  ops.push_back(pair_op("l1_loss", "|x - target|, reduced: none, sum or mean. The operands broadcast.", {},
                        [](Builder& b, const Pair& pair, const Attributes&) { return b.emit1("abs", {difference(b, pair)}); },
                        pair_samples("normal"), {"torch.nn.functional.l1_loss"}));
  ops.push_back(pair_op("smooth_l1_loss", "With d = |x - target|: d^2 / (2 beta) where d < beta, else d - beta / 2; reduced.",
                        {{"beta", AttrKind::number, 1.0}}, smooth_l1, pair_samples("normal", {{"beta", 0.75}}),
                        {"torch.nn.functional.smooth_l1_loss"}));
  ops.push_back(pair_op("huber_loss", "With d = |x - target|: d^2 / 2 where d <= delta, else delta (d - delta / 2); reduced.",
                        {{"delta", AttrKind::number, 1.0}}, huber, pair_samples("normal", {{"delta", 0.75}}),
                        {"torch.nn.functional.huber_loss"}));
  Samples divergence_samples = pair_samples("unit");
  divergence_samples.good.push_back({"log_target", {"f32[5,7]", "f32[5,7]"}, {{"log_target", true}}});
  divergence_samples.good.push_back({"batchmean", {"f32[5,7]", "f32[5,7]"}, {{"reduction", std::string("batchmean")}}, "unit"});
  ops.push_back(pair_op("kl_div",
                        "target (log target - x), x being log probabilities; with log_target, exp(target) (target - x). A target of 0 "
                        "gives 0. reduction: none, sum, mean, or batchmean, which divides by the first dim.",
                        {{"log_target", AttrKind::boolean, false}}, divergence, std::move(divergence_samples),
                        {"torch.nn.functional.kl_div"}));
  ops.push_back(probability_op());
  ops.push_back(binary_op());
  return ops;
}

}  // namespace fulmen
