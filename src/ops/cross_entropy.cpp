// cross_entropy and its gradient, for class indices and for class probabilities. Long rows (a vocabulary) are what counts:
// the one-hot target is never built, it is a comparison of the class number with the target, so that a row is read, reduced
// and written in one fused kernel. The second result, lse, lets the backward skip the row's first pass.
// The other losses are in loss.cpp.
#include <cmath>

#include "ops/axes.h"
#include "ops/families.h"

namespace fulmen {

std::vector<OpDef> cross_entropy_ops();

namespace {

enum Operand { ce_logits, ce_target, ce_weight, ce_lse };

int64_t class_dim(const TensorType& logits) { return logits.rank() == 1 ? 0 : 1; }

Dims without(Dims shape, int64_t dim) {
  shape.erase(shape.begin() + dim);
  return shape;
}

std::vector<AttrDef> attributes() {
  return {{"reduction", AttrKind::text, std::string("mean")},
          {"ignore_index", AttrKind::integer, int64_t{-100}},
          {"label_smoothing", AttrKind::number, 0.0}};
}

// Shape of the rows; checks everything about operands first..first+2 and the attributes.
Dims checked_rows(const CallTypes& call, size_t first) {
  const size_t logits = first + ce_logits, target = first + ce_target, weight = first + ce_weight;
  need_float(call, logits);
  need_rank(call, logits, 1, 100);
  const Dims& shape = call[logits].shape;
  const int64_t dim = class_dim(call[logits]), classes = shape[static_cast<size_t>(dim)];
  const Dims rows = without(shape, dim);
  if (classes == 0) call.shape_error("logits is " + to_string(shape) + ", which has no class; needed 1 or more");
  const std::string found = "logits is " + to_string(shape) + ", target is " + to_string(call[target].shape);
  if (is_float(call[target].dtype)) {
    if (call[target].shape != shape) call.shape_error(found + "; class probabilities need the shape of logits");
    if (call.attrs.get_int("ignore_index") >= 0)
      call.type_error("ignore_index is " + std::to_string(call.attrs.get_int("ignore_index")) +
                      ", target holds probabilities; it needs class indices");
  } else {
    if (call[target].dtype != DType::i64 && call[target].dtype != DType::i32)
      call.type_error("target is " + text_of(call[target].dtype) + ", needed i32 or i64 class indices, or float probabilities");
    if (call[target].shape != rows) call.shape_error(found + "; class indices need " + to_string(rows));
  }
  if (call.has(weight)) {
    need_float(call, weight);
    if (call[weight].shape != Dims{classes})
      call.shape_error("weight is " + to_string(call[weight].shape) + ", needed " + to_string(Dims{classes}) + ", one a class");
  }
  const std::string& reduction = call.attrs.get_text("reduction");
  if (reduction != "mean" && reduction != "sum" && reduction != "none")
    call.type_error("reduction is \"" + reduction + "\", needed \"mean\", \"sum\" or \"none\"");
  const double smoothing = call.attrs.get_float("label_smoothing");
  if (!(smoothing >= 0.0 && smoothing <= 1.0))
    call.shape_error("label_smoothing is " + to_string(AttrValue(smoothing)) + ", needed 0 to 1");
  return rows;
}

// What both directions need of a call, in the compute dtype. Rows keep the class dim with size 1.
struct Rows {
  Builder& b;
  ValueId raw, target, weight;  // as given
  const Attributes& attrs;
  TensorType type = b.type(raw);
  DType dtype = compute_dtype(type.dtype);
  int64_t dim = class_dim(type);
  int64_t classes = type.shape[static_cast<size_t>(dim)];
  bool probabilities = is_float(b.type(target).dtype);
  double smoothing = attrs.get_float("label_smoothing");
  ValueId logits = b.convert(raw, dtype);

  ValueId number(double value) { return b.number(value, dtype); }
  ValueId sum_classes(ValueId x) { return b.sum(x, {dim}, true); }
  ValueId sum_all(ValueId x) { return b.sum(x, {}, false); }
  ValueId row_target() { return b.unsqueeze(target, dim); }
  ValueId valid() { return b.emit1("ne", {row_target(), b.number(static_cast<double>(attrs.get_int("ignore_index")), DType::i64)}); }
  // An ignored row looks up class 0; what it finds is not used.
  ValueId safe_target() { return b.where(valid(), b.convert(row_target(), DType::i64), b.number(0.0, DType::i64)); }
  ValueId picked() { return b.convert(b.emit1("gather", {raw, safe_target()}, {{"dim", dim}}), dtype); }

  // (classes) against the dims of logits
  ValueId class_weights() {
    Dims shape(static_cast<size_t>(type.rank()), 1);
    shape[static_cast<size_t>(dim)] = classes;
    return b.convert(b.reshape(weight, shape), dtype);
  }
  // The weight of each row's class, 0 in ignored rows.
  ValueId row_weights() {
    const ValueId zero = number(0.0);
    if (weight == no_value) return b.where(valid(), number(1.0), zero);
    const Dims rows = b.type(row_target()).shape;
    const ValueId table = b.reshape(weight, {classes, 1});
    return b.where(valid(), b.convert(b.reshape(b.emit1("embedding", {table, safe_target()}), rows), dtype), zero);
  }
  // Probability targets, smoothed and weighted: what multiplies -log p.
  ValueId soft_targets() {
    ValueId q = b.convert(target, dtype);
    if (smoothing > 0.0) q = b.add(b.mul(q, 1.0 - smoothing), smoothing / static_cast<double>(classes));
    return weight == no_value ? q : b.mul(q, class_weights());
  }
  // What the mean divides by.
  ValueId denominator() {
    if (probabilities) return number(static_cast<double>(type.element_count() / classes));
    return sum_all(row_weights());
  }
  ValueId lse() { return b.emit1("logsumexp", {logits}, {{"dims", Dims{dim}}, {"keepdim", true}}); }
};

std::vector<ValueId> cross_entropy_meaning(Builder& b, const Node& node) {
  Rows rows{b, node.inputs[ce_logits], node.inputs[ce_target], node.inputs[ce_weight], node.attrs};
  const ValueId lse = rows.lse();
  ValueId loss;
  if (rows.probabilities) {
    loss = rows.sum_classes(b.mul(rows.soft_targets(), b.sub(lse, rows.logits)));
  } else {
    const ValueId weights = rows.row_weights();
    loss = b.mul(b.where(rows.valid(), b.sub(lse, rows.picked()), rows.number(0.0)), weights);
    if (rows.smoothing > 0.0) {
      ValueId uniform = b.sub(lse, rows.logits);
      if (rows.weight != no_value) uniform = b.mul(uniform, rows.class_weights());
      const ValueId share = b.mul(rows.sum_classes(uniform), rows.smoothing / static_cast<double>(rows.classes));
      loss = b.add(b.mul(loss, 1.0 - rows.smoothing), b.where(rows.valid(), share, rows.number(0.0)));
    }
  }
  const std::string& reduction = node.attrs.get_text("reduction");
  const Dims row_shape = without(rows.type.shape, rows.dim);
  if (reduction == "none")
    loss = b.reshape(loss, row_shape);
  else
    loss = rows.sum_all(loss);
  if (reduction == "mean") loss = b.div(loss, rows.denominator());
  return {b.convert(loss, rows.type.dtype), b.reshape(lse, row_shape)};
}

// The gradient of each row's loss, with the class dim: 0-dim, or one a row.
ValueId row_gradient(Rows& rows, ValueId grad) {
  Builder& b = rows.b;
  ValueId g = b.convert(grad, rows.dtype);
  if (rows.attrs.get_text("reduction") == "none") return b.unsqueeze(g, rows.dim);
  return rows.attrs.get_text("reduction") == "mean" ? b.div(g, rows.denominator()) : g;
}

std::vector<ValueId> cross_entropy_grad_meaning(Builder& b, const Node& node) {
  Rows rows{b, node.inputs[1 + ce_logits], node.inputs[1 + ce_target], node.inputs[1 + ce_weight], node.attrs};
  const ValueId lse = node.inputs[1 + ce_lse] == no_value ? rows.lse() : b.unsqueeze(b.convert(node.inputs[1 + ce_lse], rows.dtype), rows.dim);
  const ValueId p = b.exp(b.sub(rows.logits, lse));
  const ValueId g = row_gradient(rows, node.inputs[0]);
  if (rows.probabilities) {
    const ValueId q = rows.soft_targets();
    return {b.convert(b.mul(b.sub(b.mul(p, rows.sum_classes(q)), q), g), rows.type.dtype)};
  }
  const ValueId hit = b.emit1("eq", {count_along(b, rows.classes, rows.type.rank(), rows.dim, rows.raw), b.convert(rows.row_target(), DType::i64)});
  const ValueId zero = rows.number(0.0);
  const double rest = 1.0 - rows.smoothing, share = rows.smoothing / static_cast<double>(rows.classes);
  if (rows.weight == no_value) {
    ValueId inner = b.sub(p, b.where(hit, rows.number(rest), zero));
    if (share > 0.0) inner = b.add(inner, -share);
    return {b.convert(b.mul(inner, b.mul(rows.row_weights(), g)), rows.type.dtype)};
  }
  const ValueId own = b.mul(rows.row_weights(), rest);
  ValueId inner = b.sub(b.mul(p, own), b.where(hit, own, zero));
  if (share > 0.0) {
    const ValueId weights = b.mul(rows.class_weights(), share);
    inner = b.add(inner, b.sub(b.mul(p, rows.sum_all(weights)), weights));
  }
  return {b.convert(b.mul(inner, b.where(rows.valid(), g, zero)), rows.type.dtype)};
}

std::vector<ValueId> cross_entropy_gradient(Builder& b, const GradientArgs& args) {
  const ValueId weight = args.inputs[ce_weight];
  if (weight != no_value && args.need[ce_weight])
    throw UnsupportedError("cross_entropy: weight wants a gradient, there is none for it (as in PyTorch); detach it");
  Rows rows{b, args.inputs[ce_logits], args.inputs[ce_target], weight, args.node.attrs};
  const ValueId lse = args.outputs.size() > 1 ? args.outputs[1] : no_value;
  std::vector<ValueId> grads(3, no_value);
  if (args.output_grads[0] != no_value) {
    if (args.need[ce_logits])
      grads[0] = b.emit1("cross_entropy_grad",
                         {args.output_grads[0], args.inputs[ce_logits], args.inputs[ce_target], weight, lse}, args.node.attrs);
    if (args.need[ce_target]) {
      const ValueId wide = lse == no_value ? rows.lse() : b.unsqueeze(lse, rows.dim);
      ValueId inner = b.mul(b.sub(wide, rows.logits), 1.0 - rows.smoothing);
      if (weight != no_value) inner = b.mul(inner, rows.class_weights());
      grads[1] = b.convert(b.mul(inner, row_gradient(rows, args.output_grads[0])), b.type(args.inputs[ce_target]).dtype);
    }
  }
  if (args.output_grads.size() > 1 && args.output_grads[1] != no_value && args.need[ce_logits]) {
    const ValueId p = b.exp(b.sub(rows.logits, b.unsqueeze(lse, rows.dim)));
    const ValueId through = b.convert(b.mul(p, b.unsqueeze(args.output_grads[1], rows.dim)), rows.type.dtype);
    grads[0] = grads[0] == no_value ? through : b.add(grads[0], through);
  }
  return grads;
}

std::vector<Sample> good_samples(bool gradient) {
  struct Case {
    const char *name, *logits, *target, *weight, *rows;
    Attributes attrs;
  };
  const Attributes none{{"reduction", std::string("none")}}, sum{{"reduction", std::string("sum")}};
  const std::vector<Case> cases = {
      {"tokens", "f32[5,17]", "i64[5]", "none", "[5]", {}},
      {"one_row", "f32[17]", "i64[]", "none", "[]", {}},
      {"rows", "f32[5,17]", "i64[5]", "none", "[5]", none},
      {"sum", "f32[5,17]", "i32[5]", "none", "[5]", sum},
      {"weighted", "f32[5,17]", "i64[5]", "f32[17]", "[5]", {}},
      {"smoothed", "f32[5,17]", "i64[5]", "none", "[5]", {{"label_smoothing", 0.1}}},
      {"weighted_smoothed", "f32[5,17]", "i64[5]", "f32[17]", "[5]", {{"label_smoothing", 0.25}}},
      {"ignored", "f32[11,16]", "i64[11]", "f32[16]", "[11]", {{"ignore_index", int64_t{1}}, {"label_smoothing", 0.1}}},
      {"images", "f32[2,16,3,2]", "i64[2,3,2]", "none", "[2,3,2]", {}},
      {"images_weighted", "f32[2,16,3]", "i64[2,3]", "f32[16]", "[2,3]", none},
      {"probabilities", "f32[5,7]", "f32[5,7]", "none", "[5]", {}},
      {"probabilities_weighted", "f32[5,7,2]", "f32[5,7,2]", "f32[7]", "[5,2]", {{"label_smoothing", 0.1}}},
      {"long_rows", "f32[3,1031]", "i64[3]", "none", "[3]", {}},
      {"transposed", "f32[5,17]{stride=1,5}", "i64[5]", "none", "[5]", {}},
      {"row_gaps", "f32[5,17]{stride=32,1}", "i64[5]", "none", "[5]", {}},
      {"bf16", "bf16[5,67]", "i64[5]", "none", "[5]", {}},
  };
  std::vector<Sample> samples;
  for (const Case& c : cases) {
    Sample sample{c.name, {c.logits, c.target, c.weight}, c.attrs, "unit"};
    if (gradient) {
      const bool rows = c.attrs.has("reduction") && c.attrs.get_text("reduction") == "none";
      const std::string dtype(c.logits, std::string(c.logits).find('['));
      sample.inputs.insert(sample.inputs.begin(), dtype + (rows ? c.rows : "[]"));
    }
    samples.push_back(std::move(sample));
  }
  return samples;
}

}  // namespace

std::vector<OpDef> cross_entropy_ops() {
  std::vector<OpDef> ops;
  ops.push_back({
      {.name = "cross_entropy"},
      /*doc=*/
      "Cross entropy of logits (classes), (batch, classes) or (batch, classes, ...) with class indices (logits' shape without the "
      "classes; i32 or i64) or class probabilities (logits' shape). With p = softmax(logits) over the classes a row's loss is "
      "-weight[t] log p[t], with label_smoothing s (1 - s) times that plus s / classes times the weighted sum of -log p; "
      "probabilities q give -sum(weight q log p). Rows whose index is ignore_index count nothing. reduction: none, sum, or mean, "
      "which divides by the sum of weight[t] (by the rows, for probabilities). Results: the loss in logits' dtype, and each row's "
      "log-sum-exp in f32 or f64. An index outside the classes is an error when it runs.",
      /*operands=*/{{"logits"}, {"target"}, {"weight", Need::optional}},
      attributes(),
      /*shape=*/[](const CallTypes& call) -> std::vector<TensorType> {
        const Dims rows = checked_rows(call, 0);
        const DType dtype = call[ce_logits].dtype;
        return {contiguous_type(dtype, call.attrs.get_text("reduction") == "none" ? rows : Dims{}),
                contiguous_type(compute_dtype(dtype), rows)};
      },
      /*meaning=*/Decomposition{cross_entropy_meaning},
      /*gradient=*/GradientRule{cross_entropy_gradient},
      /*autocast=*/Autocast::fp32,
      /*samples=*/
      {good_samples(false),
       {{{"target_shape", {"f32[5,17]", "i64[4]", "none"}, {}}, "ShapeError", "class indices need [5]"},
        {{"probability_shape", {"f32[5,17]", "f32[5]", "none"}, {}}, "ShapeError", "class probabilities need the shape of logits"},
        {{"weight_shape", {"f32[5,17]", "i64[5]", "f32[5]"}, {}}, "ShapeError", "weight is [5], needed [17]"},
        {{"target_dtype", {"f32[5,17]", "bool[5]", "none"}, {}}, "TypeError", "target is bool"},
        {{"reduction", {"f32[5,17]", "i64[5]", "none"}, {{"reduction", std::string("avg")}}}, "TypeError", "reduction is \"avg\""},
        {{"smoothing", {"f32[5,17]", "i64[5]", "none"}, {{"label_smoothing", 1.5}}}, "ShapeError", "label_smoothing is 1.5"},
        {{"no_classes", {"f32[5,0]", "i64[5]", "none"}, {}}, "ShapeError", "which has no class"}}},
      /*torch=*/{"torch.nn.functional.cross_entropy"},
  });
  std::vector<Sample> gradient_samples = good_samples(true);
  for (Sample& sample : gradient_samples) sample.inputs.push_back("none");
  ops.push_back({
      {.name = "cross_entropy_grad"},
      /*doc=*/
      "The gradient of cross_entropy's logits for a gradient of its loss. Without weights and smoothing it is (p - [class == "
      "target]) grad / rows that count, 0 in ignored rows; p = exp(logits - lse). lse may be left out and is then computed. The "
      "attributes are cross_entropy's.",
      /*operands=*/{{"grad"}, {"logits"}, {"target"}, {"weight", Need::optional}, {"lse", Need::optional}},
      attributes(),
      /*shape=*/[](const CallTypes& call) -> std::vector<TensorType> {
        const Dims rows = checked_rows(call, 1);
        const Dims needed = call.attrs.get_text("reduction") == "none" ? rows : Dims{};
        if (call[0].shape != needed) call.shape_error("grad is " + to_string(call[0].shape) + ", needed " + to_string(needed));
        if (call.has(4) && call[4].shape != rows)
          call.shape_error("lse is " + to_string(call[4].shape) + ", needed " + to_string(rows));
        return {contiguous_type(call[1].dtype, call[1].shape)};
      },
      /*meaning=*/Decomposition{cross_entropy_grad_meaning},
      /*gradient=*/ByDecomposition{},
      /*autocast=*/Autocast::keep,
      /*samples=*/
      {std::move(gradient_samples),
       {{{"grad_shape", {"f32[5]", "f32[5,17]", "i64[5]", "none", "none"}, {}}, "ShapeError", "grad is [5], needed []"}}},
      /*torch=*/{},
  });
  return ops;
}

}  // namespace fulmen
