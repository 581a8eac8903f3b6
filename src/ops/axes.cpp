#include "ops/axes.h"

#include <algorithm>

namespace fulmen {

Dims checked_dims(const CallTypes& call, const Dims& dims, int64_t rank) {
  Dims result;
  if (dims.empty()) {
    for (int64_t i = 0; i < rank; ++i) result.push_back(i);
    return result;
  }
  for (int64_t dim : dims) {
    const int64_t at = checked_dim(call, dim, rank, "dims");
    if (std::find(result.begin(), result.end(), at) != result.end())
      call.shape_error("dims is " + to_string(dims) + ", which names dim " + std::to_string(at) +
                       " twice; needed each dim once");
    result.push_back(at);
  }
  if (rank == 0) return {};
  std::sort(result.begin(), result.end());
  return result;
}

Dims accepted_dims(const Dims& dims, int64_t rank) {
  Dims result;
  if (rank == 0) return result;
  if (dims.empty()) {
    for (int64_t i = 0; i < rank; ++i) result.push_back(i);
    return result;
  }
  for (int64_t dim : dims) result.push_back(normalise_dim(dim, rank));
  std::sort(result.begin(), result.end());
  return result;
}

Dims reduced_shape(const Dims& shape, const Dims& dims, bool keepdim) {
  Dims result;
  for (size_t i = 0; i < shape.size(); ++i) {
    const bool reduced = std::binary_search(dims.begin(), dims.end(), static_cast<int64_t>(i));
    if (!reduced)
      result.push_back(shape[i]);
    else if (keepdim)
      result.push_back(1);
  }
  return result;
}

int64_t size_of_dims(const Dims& shape, const Dims& dims) {
  int64_t count = 1;
  for (int64_t dim : dims) count *= shape[static_cast<size_t>(dim)];
  return count;
}

std::string text_of(DType dtype) { return std::string(dtype_name(dtype)); }

void need_rank(const CallTypes& call, size_t operand, int least, int most) {
  const int rank = call[operand].rank();
  if (rank >= least && rank <= most) return;
  std::string needed = std::to_string(least);
  if (most > 64)
    needed += " or more";
  else if (most > least)
    needed += " to " + std::to_string(most);
  call.shape_error(call.op.operands[operand].name + " has " + std::to_string(rank) + " dims, needed " + needed);
}

ValueId count_along(Builder& b, int64_t size, int64_t rank, int64_t dim, ValueId like) {
  const ValueId line = b.emit1("arange", {}, {{"start", int64_t{0}}, {"end", size}, {"device", to_string(b.type(like).device)}});
  Dims shape(static_cast<size_t>(rank), 1);
  shape[static_cast<size_t>(dim)] = size;
  return b.reshape(line, shape);
}

ValueId full_on(Builder& b, const Dims& shape, double value, DType dtype, ValueId like) {
  return b.emit1("full", {}, {{"shape", shape}, {"value", value}, {"dtype", dtype}, {"device", to_string(b.type(like).device)}});
}

ValueId scaled(Builder& b, ValueId x, double number) {
  const DType dtype = b.type(x).dtype;
  if (number == 1.0) return x;
  const ValueId factor = b.number(number, is_half(dtype) || !is_float(dtype) ? DType::f32 : dtype);
  b.trace().value(factor).type.is_number = true;
  return b.mul(x, factor);
}

std::optional<DType> dtype_attribute(const Attributes& attrs, std::string_view name) {
  if (!attrs.has(name)) return std::nullopt;
  return attrs.get_dtype(name);
}

}  // namespace fulmen
