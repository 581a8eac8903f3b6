// What shape rules share: dims counted from the end, broadcasting with a message, result types, checks of dtypes.
// Messages name the op, the argument, what was found and what is needed.
#pragma once

#include <initializer_list>
#include <string>
#include <vector>

#include "ops/op_def.h"

namespace fulmen {

// A dim in [-rank, rank) as one in [0, rank). A 0-dim tensor has the one dim 0, as in PyTorch. For dims that a shape
// rule has accepted.
int64_t normalise_dim(int64_t dim, int64_t rank);

// The same with a check: "gather: dim is 4, input has 3 dims; dim must be in [-3, 2]" (ShapeError).
int64_t checked_dim(const CallTypes& call, int64_t dim, int64_t rank, const std::string& argument = "dim");

// The op's attribute of that name, normalised for `rank`, after its shape rule accepted it.
int64_t dim_of(const Attributes& attrs, int64_t rank, std::string_view name = "dim");

// Broadcast of all given operands (absent ones are skipped): "add: a is [3,4], b is [2,4]; sizes must be equal or 1,
// dim -2 has 3 and 2" (ShapeError).
Dims broadcast_all(const CallTypes& call);
Dims broadcast_some(const CallTypes& call, std::initializer_list<size_t> operands);

// Name of operand i for messages; of a variadic operand with its position ("tensors[2]").
std::string operand_name(const OpDef& op, size_t i);

// A contiguous result; the builder puts it on the call's device.
inline TensorType result_type(DType dtype, Dims shape) { return contiguous_type(dtype, std::move(shape)); }

// The dtype of arithmetic in floats: the promoted one if that is a float, else the default float f32.
inline DType float_result(DType promoted) { return is_float(promoted) ? promoted : DType::f32; }

// TypeErrors: "relu_grad: index is f32, needed an integer dtype".
void need_integer(const CallTypes& call, size_t i);
void need_bool(const CallTypes& call, size_t i);
void need_same_dtype(const CallTypes& call, size_t i, size_t j);
void need_float(const CallTypes& call, size_t i);

}  // namespace fulmen
