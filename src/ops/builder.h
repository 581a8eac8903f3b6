// Builds nodes of a trace, with inference and checks: the only way nodes are made by tracing, decompositions and
// gradient rules. `emit` works for every op of the catalogue; the short forms below keep rules readable.
#pragma once

#include <string_view>
#include <vector>

#include "ops/op_def.h"

namespace fulmen {

class Builder {
 public:
  explicit Builder(Trace& trace) : trace_(trace) {}

  Trace& trace() { return trace_; }
  // By value: emitting a node moves the values, and rules hold types while they emit.
  TensorType type(ValueId id) const { return trace_.type(id); }

  // Checks the call against the op's signature and shape rule, fills attribute defaults and appends the node.
  // requires_grad of float results: any operand's, unless the op is not differentiable.
  std::vector<ValueId> emit(std::string_view op, std::vector<ValueId> inputs, Attributes attrs = {});
  ValueId emit1(std::string_view op, std::vector<ValueId> inputs, Attributes attrs = {});

  // Result types of a call without adding it.
  std::vector<TensorType> infer(const OpDef& op, const std::vector<ValueId>& inputs, Attributes& attrs) const;

  // A value with one number, broadcast where it is used. `full` has a shape.
  ValueId full(const Dims& shape, double value, DType dtype);
  ValueId number(double value, DType dtype) { return full({}, value, dtype); }
  ValueId zeros_like(ValueId x);  // on x's device

  ValueId add(ValueId a, ValueId b) { return emit1("add", {a, b}); }
  ValueId sub(ValueId a, ValueId b) { return emit1("sub", {a, b}); }
  ValueId mul(ValueId a, ValueId b) { return emit1("mul", {a, b}); }
  ValueId div(ValueId a, ValueId b) { return emit1("div", {a, b}); }
  ValueId neg(ValueId x) { return emit1("neg", {x}); }
  ValueId exp(ValueId x) { return emit1("exp", {x}); }
  ValueId log(ValueId x) { return emit1("log", {x}); }
  ValueId where(ValueId condition, ValueId yes, ValueId no) { return emit1("where", {condition, yes, no}); }
  // With a Python-like number on the right; keeps x's dtype if that is a float.
  ValueId add(ValueId x, double number);
  ValueId mul(ValueId x, double number);

  ValueId convert(ValueId x, DType dtype);                // x itself if it has that dtype
  ValueId reshape(ValueId x, const Dims& shape);          // x itself if it has that shape
  ValueId expand(ValueId x, const Dims& shape);           // broadcast_to; x itself if it has that shape
  ValueId permute(ValueId x, const Dims& dims);
  ValueId transpose(ValueId x, int64_t a, int64_t b);     // negative counts from the end
  ValueId slice(ValueId x, int64_t dim, int64_t begin, int64_t end, int64_t step = 1);
  ValueId unsqueeze(ValueId x, int64_t dim);
  ValueId sum(ValueId x, const Dims& dims, bool keepdim);  // empty dims: all
  ValueId amax(ValueId x, const Dims& dims, bool keepdim);
  ValueId matmul(ValueId a, ValueId b);

  // Sums x over the dims that broadcasting `shape` to x's shape added, and gives it exactly `shape`: the adjoint of
  // expand. The result has `dtype`.
  ValueId sum_to(ValueId x, const Dims& shape, DType dtype);

 private:
  Trace& trace_;
};

// Broadcast of two shapes by PyTorch's rule; empty if they don't fit.
std::optional<Dims> broadcast_shapes(const Dims& a, const Dims& b);

// The dtype of an op over these operands by PyTorch's promotion: dims beat 0-dim tensors, which beat numbers, within
// the highest category (bool < integer < float). A number alone gives its default (f32 for a float, i64 for an integer).
DType promoted_dtype(std::span<const TensorType* const> operands);

}  // namespace fulmen
