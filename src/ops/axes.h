// Lists of dims, shapes after a reduction, and the compute dtype of 16-bit floats: what the shape rules, decompositions
// and reference loops of reductions and of everything built on them share. Single dims and broadcasting: rules/dims.h.
#pragma once

#include "ops/builder.h"
#include "ops/op_def.h"
#include "ops/rules/dims.h"

namespace fulmen {

// The dims of a reduction, ascending and without repeats (an error); an empty list means all.
Dims checked_dims(const CallTypes& call, const Dims& dims, int64_t rank);

// The same for dims that a shape rule has accepted.
Dims accepted_dims(const Dims& dims, int64_t rank);

// `dims` must be normal.
Dims reduced_shape(const Dims& shape, const Dims& dims, bool keepdim);

// Product of the sizes of `dims`.
int64_t size_of_dims(const Dims& shape, const Dims& dims);

// f32 for f16 and bf16, the dtype itself for others: what statistics and exponentials are computed in.
constexpr DType compute_dtype(DType dtype) { return is_half(dtype) ? DType::f32 : dtype; }

// "x has 1 dims, needed 2 or more"
void need_rank(const CallTypes& call, size_t operand, int least, int most);

// dtype_name as a string, for messages.
std::string text_of(DType dtype);

// 0, 1, ..., size - 1 in i64 along `dim` of a value of `rank` dims, the others of size 1; on the device of `like`.
ValueId count_along(Builder& b, int64_t size, int64_t rank, int64_t dim, ValueId like);

// A full tensor on the device of `like`. For one number, Builder::number is enough: it goes with any device.
ValueId full_on(Builder& b, const Dims& shape, double value, DType dtype, ValueId like);

// x times a number that isn't rounded to x's dtype, as PyTorch does with Python numbers.
ValueId scaled(Builder& b, ValueId x, double number);

// The attribute as a dtype, or nothing if it is none.
std::optional<DType> dtype_attribute(const Attributes& attrs, std::string_view name);

}  // namespace fulmen
