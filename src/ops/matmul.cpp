// Matrix products: matmul is the primitive (and einsum, in einsum.cpp, its general form); linear, addmm, bmm, baddbmm,
// outer and dot are composites with gradients of their own, so that an executor may claim them whole.
#include <algorithm>

#include "ops/axes.h"
#include "ops/families.h"
#include "ops/reference_loops.h"

namespace fulmen {

std::vector<OpDef> einsum_ops();  // einsum.cpp

namespace {

std::string shapes_text(const CallTypes& call, size_t i, size_t j) {
  return operand_name(call.op, i) + " is " + to_string(call[i].shape) + ", " + operand_name(call.op, j) + " is " +
         to_string(call[j].shape);
}

void need_product_dtypes(const CallTypes& call, size_t i, size_t j) {
  need_same_dtype(call, i, j);
  if (call[i].dtype == DType::boolean) call.type_error(operand_name(call.op, i) + " is bool, needed a number dtype");
}

// The result of PyTorch's matmul, with its checks, for operands 0 and 1.
Dims matmul_shape(const CallTypes& call) {
  need_rank(call, 0, 1, 100);
  need_rank(call, 1, 1, 100);
  need_product_dtypes(call, 0, 1);
  const Dims &a = call[0].shape, &b = call[1].shape;
  const int64_t inner_a = a.back(), inner_b = b.size() == 1 ? b[0] : b[b.size() - 2];
  if (inner_a != inner_b)
    call.shape_error(shapes_text(call, 0, 1) + "; the last dim of " + operand_name(call.op, 0) + " has " + std::to_string(inner_a) +
                     ", the " + (b.size() == 1 ? "only" : "second last") + " dim of " + operand_name(call.op, 1) + " has " +
                     std::to_string(inner_b) + ", needed equal");
  const Dims batch_a(a.begin(), a.end() - std::min<ptrdiff_t>(2, static_cast<ptrdiff_t>(a.size())));
  const Dims batch_b(b.begin(), b.end() - std::min<ptrdiff_t>(2, static_cast<ptrdiff_t>(b.size())));
  auto shape = broadcast_shapes(batch_a, batch_b);
  if (!shape)
    call.shape_error(shapes_text(call, 0, 1) + "; the batch dims " + to_string(batch_a) + " and " + to_string(batch_b) +
                     " don't broadcast, needed equal sizes or 1");
  if (a.size() > 1) shape->push_back(a[a.size() - 2]);
  if (b.size() > 1) shape->push_back(b.back());
  return *shape;
}

void matmul_reference(const ReferenceArgs& args) {
  const HostTensor &a = *args.inputs[0], &b = *args.inputs[1];
  HostTensor& out = args.outputs[0];
  Dims shape_a = a.type.shape, shape_b = b.type.shape, shape = out.type.shape;
  if (shape_a.size() == 1) {
    shape_a.insert(shape_a.begin(), 1);
    shape.insert(shape.end() - (shape_b.size() > 1 ? 1 : 0), 1);
  }
  if (shape_b.size() == 1) {
    shape_b.push_back(1);
    shape.push_back(1);
  }
  const int64_t rows = shape[shape.size() - 2], columns = shape.back(), inner = shape_a.back();
  const Dims batch(shape.begin(), shape.end() - 2);
  Dims batch_a(shape_a.begin(), shape_a.end() - 2), batch_b(shape_b.begin(), shape_b.end() - 2);
  for_each_broadcast(batch, {&batch_a, &batch_b}, [&](int64_t linear, const std::vector<int64_t>& at) {
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < columns; ++j) {
        const int64_t to = (linear * rows + i) * columns + j;
        const int64_t from_a = (at[0] * rows + i) * inner, from_b = at[1] * inner * columns + j;
        if (is_float(out.type.dtype)) {
          double total = 0.0;
          for (int64_t k = 0; k < inner; ++k) total += a.f[static_cast<size_t>(from_a + k)] * b.f[static_cast<size_t>(from_b + k * columns)];
          out.f[static_cast<size_t>(to)] = total;
        } else {
          uint64_t total = 0;
          for (int64_t k = 0; k < inner; ++k)
            total += static_cast<uint64_t>(a.i[static_cast<size_t>(from_a + k)]) * static_cast<uint64_t>(b.i[static_cast<size_t>(from_b + k * columns)]);
          out.i[static_cast<size_t>(to)] = wrap_integer(static_cast<int64_t>(total), out.type.dtype);
        }
      }
  });
}

Dims merged_rows(const Dims& shape) { return {element_count(Dims(shape.begin(), shape.end() - 1)), shape.back()}; }

// Gradients of a b for matrices with batch dims; either may be no_value if it isn't needed.
std::vector<ValueId> product_gradients(Builder& b, ValueId x, ValueId y, ValueId grad, bool need_x, bool need_y) {
  const Dims shape_x = b.type(x).shape, shape_y = b.type(y).shape;
  const DType dtype = b.type(x).dtype;
  std::vector<ValueId> result{no_value, no_value};
  if (need_x) result[0] = b.sum_to(b.matmul(grad, b.transpose(y, -1, -2)), shape_x, dtype);
  if (need_y) {
    // One product over all rows instead of a batch of products and their sum.
    if (shape_y.size() == 2 && shape_x.size() > 2)
      result[1] = b.matmul(b.transpose(b.reshape(x, merged_rows(shape_x)), 0, 1), b.reshape(grad, merged_rows(b.type(grad).shape)));
    else
      result[1] = b.sum_to(b.matmul(b.transpose(x, -1, -2), grad), shape_y, dtype);
  }
  return result;
}

std::vector<ValueId> matmul_gradient(Builder& b, const GradientArgs& args) {
  ValueId x = args.inputs[0], y = args.inputs[1], grad = args.output_grads[0];
  const Dims shape_x = b.type(x).shape, shape_y = b.type(y).shape;
  if (shape_x.size() == 1 && shape_y.size() == 1)
    return {args.need[0] ? b.mul(y, grad) : no_value, args.need[1] ? b.mul(x, grad) : no_value};
  if (shape_x.size() == 1) {
    x = b.unsqueeze(x, 0);
    grad = b.unsqueeze(grad, -2);
  }
  if (shape_y.size() == 1) {
    y = b.unsqueeze(y, 1);
    grad = b.unsqueeze(grad, -1);
  }
  auto grads = product_gradients(b, x, y, grad, args.need[0], args.need[1]);
  if (args.need[0]) grads[0] = b.reshape(grads[0], shape_x);
  if (args.need[1]) grads[1] = b.reshape(grads[1], shape_y);
  return grads;
}

OpDef matmul_op() {
  return {
      {.name = "matmul"},
      /*doc=*/
      "Matrix product by PyTorch's rules. (..., n, k) by (..., k, m) gives (..., n, m), batch dims broadcast; a 1-D operand is a "
      "row (a) or a column (b) whose dim is dropped from the result. Both operands have one dtype, which is the result's; floats "
      "accumulate in f32 or wider.",
      /*operands=*/{{"a"}, {"b"}},
      /*attributes=*/{},
      /*shape=*/
      [](const CallTypes& call) -> std::vector<TensorType> { return {contiguous_type(call[0].dtype, matmul_shape(call))}; },
      /*meaning=*/Primitive{matmul_reference},
      /*gradient=*/GradientRule{matmul_gradient},
      /*autocast=*/Autocast::lower,
      /*samples=*/
      {{{"square", {"f32[8,8]", "f32[8,8]"}, {}},
        {"primes", {"f32[5,7]", "f32[7,3]"}, {}},
        {"batch", {"f32[3,5,7]", "f32[3,7,2]"}, {}},
        {"batch_broadcast", {"f32[2,1,5,7]", "f32[3,7,2]"}, {}},
        {"batch_by_matrix", {"f32[2,3,5,7]", "f32[7,4]"}, {}},
        {"matrix_by_batch", {"f32[5,7]", "f32[3,7,2]"}, {}},
        {"vectors", {"f32[17]", "f32[17]"}, {}},
        {"row_by_matrix", {"f32[7]", "f32[7,3]"}, {}},
        {"matrix_by_column", {"f32[5,7]", "f32[7]"}, {}},
        {"row_by_batch", {"f32[7]", "f32[2,7,3]"}, {}},
        {"batch_by_column", {"f32[2,5,7]", "f32[7]"}, {}},
        {"transposed", {"f32[5,7]{stride=1,5}", "f32[7,3]{stride=1,7}"}, {}},
        {"row_gaps", {"f32[5,7]{stride=16,1}", "f32[7,3]"}, {}},
        {"expanded", {"f32[4,7]{stride=0,1}", "f32[7,3]"}, {}},
        {"one", {"f32[1,1]", "f32[1,1]"}, {}},
        {"no_rows", {"f32[0,7]", "f32[7,3]"}, {}},
        {"nothing_to_sum", {"f32[5,0]", "f32[0,3]"}, {}},
        {"integers", {"i32[3,4]", "i32[4,2]"}, {}},
        {"bf16", {"bf16[9,33]", "bf16[33,5]"}, {}},
        {"f16", {"f16[9,33]", "f16[33,5]"}, {}},
        {"f64", {"f64[3,5]", "f64[5,2]"}, {}}},
       {{{"inner", {"f32[2,3]", "f32[4,5]"}, {}}, "ShapeError", "the last dim of a has 3, the second last dim of b has 4"},
        {{"batch_sizes", {"f32[2,2,3]", "f32[3,3,5]"}, {}}, "ShapeError", "the batch dims [2] and [3] don't broadcast"},
        {{"scalar", {"f32[]", "f32[4]"}, {}}, "ShapeError", "a has 0 dims, needed 1 or more"},
        {{"dtypes", {"f32[2,3]", "bf16[3,2]"}, {}}, "TypeError", "b is bf16, a is f32"},
        {{"bools", {"bool[2,3]", "bool[3,2]"}, {}}, "TypeError", "a is bool"}}},
      /*torch=*/{"torch.matmul", "Tensor.matmul", "operator.matmul", "torch.mm", "Tensor.mm", "torch.mv", "Tensor.mv"},
  };
}

Dims linear_shape(const CallTypes& call) {
  need_rank(call, 0, 1, 100);
  need_rank(call, 1, 1, 2);
  need_product_dtypes(call, 0, 1);
  if (call.has(2)) need_same_dtype(call, 0, 2);
  const Dims &x = call[0].shape, &weight = call[1].shape;
  if (x.back() != weight.back())
    call.shape_error("x is " + to_string(x) + ", weight is " + to_string(weight) + "; the last dim of x has " +
                     std::to_string(x.back()) + ", weight takes " + std::to_string(weight.back()) + ", needed equal");
  Dims shape(x.begin(), x.end() - 1);
  if (weight.size() == 2) shape.push_back(weight[0]);
  if (call.has(2)) {
    const Dims& bias = call[2].shape;
    const Dims needed = weight.size() == 2 ? Dims{weight[0]} : Dims{};
    if (bias != needed && !(bias.size() <= 1 && element_count(bias) == 1))
      call.shape_error("bias is " + to_string(bias) + ", needed " + to_string(needed) + " to go with weight " + to_string(weight));
    shape = *broadcast_shapes(shape, bias);
  }
  return shape;
}

std::vector<ValueId> linear_gradient(Builder& b, const GradientArgs& args) {
  const ValueId x = args.inputs[0], weight = args.inputs[1], bias = args.inputs[2];
  const Dims shape_x = b.type(x).shape, shape_weight = b.type(weight).shape;
  const ValueId grad = args.output_grads[0];
  const int64_t inputs = shape_x.back(), outputs = shape_weight.size() == 2 ? shape_weight[0] : 1;
  const int64_t rows = element_count(Dims(shape_x.begin(), shape_x.end() - 1));
  const ValueId weight2 = b.reshape(weight, {outputs, inputs});
  const ValueId grad2 = b.reshape(grad, {rows, outputs});
  std::vector<ValueId> grads{no_value, no_value, no_value};
  if (args.need[0]) grads[0] = b.reshape(b.matmul(grad2, weight2), shape_x);
  if (args.need[1])
    grads[1] = b.reshape(b.matmul(b.transpose(grad2, 0, 1), b.reshape(x, {rows, inputs})), shape_weight);
  if (bias != no_value && args.need[2]) {
    const TensorType type = b.type(bias);
    grads[2] = type.element_count() == outputs ? b.reshape(b.sum(grad2, {0}, false), type.shape) : b.sum_to(grad, type.shape, type.dtype);
    grads[2] = b.convert(grads[2], type.dtype);
  }
  return grads;
}

OpDef linear_op() {
  return {
      {.name = "linear"},
      /*doc=*/
      "x weight^T + bias: x is (..., in), weight (out, in) or (in), bias (out); the result is (..., out), or (...) for a 1-D "
      "weight. All in one dtype. Gradients: grad weight; grad^T x over all rows; column sums of grad.",
      /*operands=*/{{"x"}, {"weight"}, {"bias", Need::optional}},
      /*attributes=*/{},
      /*shape=*/
      [](const CallTypes& call) -> std::vector<TensorType> { return {contiguous_type(call[0].dtype, linear_shape(call))}; },
      /*meaning=*/Decomposition{[](Builder& b, const Node& node) -> std::vector<ValueId> {
        const ValueId weight = node.inputs[1];
        const ValueId product = b.matmul(node.inputs[0], b.type(weight).rank() == 2 ? b.transpose(weight, 0, 1) : weight);
        return {node.inputs[2] == no_value ? product : b.add(product, node.inputs[2])};
      }},
      /*gradient=*/GradientRule{linear_gradient},
      /*autocast=*/Autocast::lower,
      /*samples=*/
      {{{"rows", {"f32[5,7]", "f32[3,7]", "f32[3]"}, {}},
        {"no_bias", {"f32[5,7]", "f32[3,7]", "none"}, {}},
        {"batch", {"f32[2,5,16]", "f32[11,16]", "f32[11]"}, {}},
        {"one_row", {"f32[7]", "f32[3,7]", "f32[3]"}, {}},
        {"weight_row", {"f32[2,5,7]", "f32[7]", "f32[]"}, {}},
        {"no_rows", {"f32[0,7]", "f32[3,7]", "f32[3]"}, {}},
        {"no_inputs", {"f32[2,0]", "f32[3,0]", "f32[3]"}, {}},
        {"transposed", {"f32[5,7]{stride=1,5}", "f32[3,7]{stride=1,3}", "f32[3]"}, {}},
        {"one_output", {"f32[5,7]", "f32[1,7]", "f32[1]"}, {}},
        {"bf16", {"bf16[4,33]", "bf16[9,33]", "bf16[9]"}, {}},
        {"f64", {"f64[4,3]", "f64[2,3]", "f64[2]"}, {}}},
       {{{"inner", {"f32[5,7]", "f32[3,8]"}, {}}, "ShapeError", "the last dim of x has 7, weight takes 8"},
        {{"bias_size", {"f32[5,7]", "f32[3,7]", "f32[4]"}, {}}, "ShapeError", "bias is [4], needed [3]"},
        {{"dtypes", {"f32[5,7]", "bf16[3,7]"}, {}}, "TypeError", "weight is bf16, x is f32"}}},
      /*torch=*/{"torch.nn.functional.linear", "torch._C._nn.linear"},
  };
}

// The product of operands 1 and 2 as a call of its own, for the checks and messages that matmul has.
struct ProductRule {
  int rank;
  std::vector<TensorType> operator()(const CallTypes& call) const {
    const size_t first = call.op.operands[0].name == "input" ? 1 : 0;
    need_rank(call, first, rank, rank);
    need_rank(call, first + 1, rank, rank);
    need_product_dtypes(call, first, first + 1);
    const Dims &a = call[first].shape, &b = call[first + 1].shape;
    if (a.back() != b[b.size() - 2] || (rank == 3 && a[0] != b[0]))
      call.shape_error(shapes_text(call, first, first + 1) + "; needed " + (rank == 3 ? "[b,n,k] and [b,k,m]" : "[n,k] and [k,m]"));
    Dims shape = a;
    shape.back() = b.back();
    if (first == 1) {
      need_same_dtype(call, 1, 0);
      const auto fit = broadcast_shapes(call[0].shape, shape);
      if (!fit || *fit != shape)
        call.shape_error("input is " + to_string(call[0].shape) + ", the product is " + to_string(shape) +
                         "; input must broadcast to it");
    }
    return {contiguous_type(call[first].dtype, shape)};
  }
};

// beta 0 leaves the input out, so that a NaN in it doesn't spread.
std::vector<ValueId> scaled_sum(Builder& b, const Node& node) {
  const double beta = node.attrs.get_float("beta"), alpha = node.attrs.get_float("alpha");
  ValueId product = b.matmul(node.inputs[1], node.inputs[2]);
  product = scaled(b, product, alpha);
  if (beta == 0.0) return {product};
  return {b.add(scaled(b, node.inputs[0], beta), product)};
}

std::vector<ValueId> scaled_sum_gradient(Builder& b, const GradientArgs& args) {
  const double beta = args.node.attrs.get_float("beta"), alpha = args.node.attrs.get_float("alpha");
  const ValueId grad = args.output_grads[0];
  std::vector<ValueId> grads{no_value, no_value, no_value};
  if (args.need[0]) {
    const TensorType type = b.type(args.inputs[0]);
    grads[0] = scaled(b, b.sum_to(grad, type.shape, type.dtype), beta);
  }
  const ValueId weighted = args.need[1] || args.need[2] ? scaled(b, grad, alpha) : grad;
  const auto products = product_gradients(b, args.inputs[1], args.inputs[2], weighted, args.need[1], args.need[2]);
  grads[1] = products[0];
  grads[2] = products[1];
  return grads;
}

OpDef scaled_sum_op(const std::string& name, const std::string& doc, int rank, Samples samples, std::vector<std::string> torch) {
  return {
      {.name = name},
      doc,
      /*operands=*/{{"input"}, {"a"}, {"b"}},
      /*attributes=*/{{"beta", AttrKind::number, 1.0}, {"alpha", AttrKind::number, 1.0}},
      /*shape=*/ProductRule{rank},
      /*meaning=*/Decomposition{scaled_sum},
      /*gradient=*/GradientRule{scaled_sum_gradient},
      /*autocast=*/Autocast::lower,
      std::move(samples),
      std::move(torch),
  };
}

}  // namespace

std::vector<OpDef> matmul_ops() {
  std::vector<OpDef> ops;
  ops.push_back(matmul_op());
  ops.push_back(linear_op());
  ops.push_back(scaled_sum_op(
      "addmm", "beta input + alpha (a b): a is (n, k), b (k, m), input broadcasts to (n, m). beta 0 ignores the input's values.", 2,
      {{{"bias", {"f32[3]", "f32[5,7]", "f32[7,3]"}, {}},
        {"full", {"f32[5,3]", "f32[5,7]", "f32[7,3]"}, {{"beta", 0.5}, {"alpha", 2.0}}},
        {"no_input", {"f32[3]", "f32[5,7]", "f32[7,3]"}, {{"beta", 0.0}}},
        {"transposed", {"f32[3]", "f32[5,7]{stride=1,5}", "f32[7,3]{stride=1,7}"}, {}},
        {"no_rows", {"f32[3]", "f32[0,7]", "f32[7,3]"}, {}},
        {"bf16", {"bf16[9]", "bf16[4,33]", "bf16[33,9]"}, {}}},
       {{{"inner", {"f32[3]", "f32[5,7]", "f32[8,3]"}, {}}, "ShapeError", "needed [n,k] and [k,m]"},
        {{"input_shape", {"f32[4]", "f32[5,7]", "f32[7,3]"}, {}}, "ShapeError", "input is [4], the product is [5,3]"},
        {{"rank", {"f32[3]", "f32[2,5,7]", "f32[7,3]"}, {}}, "ShapeError", "a has 3 dims, needed 2"},
        {{"dtypes", {"f32[3]", "f32[5,7]", "bf16[7,3]"}, {}}, "TypeError", "b is bf16, a is f32"}}},
      {"torch.addmm", "Tensor.addmm"}));
  ops.push_back(scaled_sum_op(
      "baddbmm", "beta input + alpha (a b) in batches: a is (batch, n, k), b (batch, k, m), input broadcasts to (batch, n, m).", 3,
      {{{"bias", {"f32[3]", "f32[2,5,7]", "f32[2,7,3]"}, {}},
        {"full", {"f32[2,5,3]", "f32[2,5,7]", "f32[2,7,3]"}, {{"beta", 0.5}, {"alpha", 2.0}}},
        {"no_input", {"f32[3]", "f32[2,5,7]", "f32[2,7,3]"}, {{"beta", 0.0}}}},
       {{{"batch", {"f32[3]", "f32[2,5,7]", "f32[3,7,3]"}, {}}, "ShapeError", "needed [b,n,k] and [b,k,m]"}}},
      {"torch.baddbmm", "Tensor.baddbmm"}));
  ops.push_back({
      {.name = "bmm"},
      /*doc=*/"Batch of matrix products: (batch, n, k) by (batch, k, m) gives (batch, n, m). No broadcasting.",
      /*operands=*/{{"a"}, {"b"}},
      /*attributes=*/{},
      /*shape=*/ProductRule{3},
      /*meaning=*/
      Decomposition{[](Builder& b, const Node& node) -> std::vector<ValueId> { return {b.matmul(node.inputs[0], node.inputs[1])}; }},
      /*gradient=*/GradientRule{[](Builder& b, const GradientArgs& args) -> std::vector<ValueId> {
        return product_gradients(b, args.inputs[0], args.inputs[1], args.output_grads[0], args.need[0], args.need[1]);
      }},
      /*autocast=*/Autocast::lower,
      /*samples=*/
      {{{"primes", {"f32[3,5,7]", "f32[3,7,2]"}, {}},
        {"transposed", {"f32[3,5,7]", "f32[3,7,2]{stride=14,1,7}"}, {}},
        {"expanded", {"f32[3,5,7]{stride=0,7,1}", "f32[3,7,2]"}, {}},
        {"no_batch", {"f32[0,5,7]", "f32[0,7,2]"}, {}},
        {"bf16", {"bf16[2,4,17]", "bf16[2,17,3]"}, {}}},
       {{{"batch", {"f32[3,5,7]", "f32[2,7,2]"}, {}}, "ShapeError", "needed [b,n,k] and [b,k,m]"},
        {{"rank", {"f32[5,7]", "f32[7,2]"}, {}}, "ShapeError", "a has 2 dims, needed 3"}}},
      /*torch=*/{"torch.bmm", "Tensor.bmm"},
  });
  ops.push_back({
      {.name = "outer"},
      /*doc=*/"Outer product of two vectors: (n) by (m) gives (n, m) with a[i] b[j].",
      /*operands=*/{{"a"}, {"b"}},
      /*attributes=*/{},
      /*shape=*/[](const CallTypes& call) -> std::vector<TensorType> {
        need_rank(call, 0, 1, 1);
        need_rank(call, 1, 1, 1);
        return {contiguous_type(promoted_dtype(call.inputs), {call[0].shape[0], call[1].shape[0]})};
      },
      /*meaning=*/Decomposition{[](Builder& b, const Node& node) -> std::vector<ValueId> {
        return {b.mul(b.unsqueeze(node.inputs[0], 1), node.inputs[1])};
      }},
      /*gradient=*/ByDecomposition{},
      /*autocast=*/Autocast::keep,
      /*samples=*/
      {{{"primes", {"f32[5]", "f32[7]"}, {}}, {"mixed", {"bf16[5]", "f32[3]"}, {}}, {"empty", {"f32[0]", "f32[3]"}, {}}},
       {{{"rank", {"f32[5,1]", "f32[7]"}, {}}, "ShapeError", "a has 2 dims, needed 1"}}},
      /*torch=*/{"torch.outer", "Tensor.outer"},
  });
  ops.push_back({
      {.name = "dot"},
      /*doc=*/"Inner product of two vectors of one length and dtype; a 0-dim result.",
      /*operands=*/{{"a"}, {"b"}},
      /*attributes=*/{},
      /*shape=*/[](const CallTypes& call) -> std::vector<TensorType> {
        need_rank(call, 0, 1, 1);
        need_rank(call, 1, 1, 1);
        need_product_dtypes(call, 0, 1);
        if (call[0].shape != call[1].shape) call.shape_error(shapes_text(call, 0, 1) + "; needed equal lengths");
        return {contiguous_type(call[0].dtype, {})};
      },
      /*meaning=*/
      Decomposition{[](Builder& b, const Node& node) -> std::vector<ValueId> { return {b.matmul(node.inputs[0], node.inputs[1])}; }},
      /*gradient=*/ByDecomposition{},
      /*autocast=*/Autocast::lower,
      /*samples=*/
      {{{"prime", {"f32[17]", "f32[17]"}, {}}, {"empty", {"f32[0]", "f32[0]"}, {}}, {"bf16", {"bf16[33]", "bf16[33]"}, {}}},
       {{{"lengths", {"f32[3]", "f32[4]"}, {}}, "ShapeError", "needed equal lengths"}}},
      /*torch=*/{"torch.dot", "Tensor.dot"},
  });
  for (OpDef& op : einsum_ops()) ops.push_back(std::move(op));
  return ops;
}

}  // namespace fulmen
