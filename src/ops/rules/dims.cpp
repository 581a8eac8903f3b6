#include "ops/rules/dims.h"

namespace fulmen {
namespace {

Dims broadcast_operands(const CallTypes& call, const std::vector<size_t>& operands) {
  Dims out;
  size_t widest = 0;  // the operand that gave each message its left side: the first one that isn't 1 there
  bool first = true;
  for (size_t i : operands) {
    if (!call.has(i)) continue;
    const Dims& shape = call[i].shape;
    if (first) {
      out = shape;
      widest = i;
      first = false;
      continue;
    }
    if (shape.size() > out.size()) out.insert(out.begin(), shape.size() - out.size(), 1);
    for (size_t back = 1; back <= shape.size(); ++back) {
      int64_t& have = out[out.size() - back];
      const int64_t size = shape[shape.size() - back];
      if (have == 1) {
        have = size;
      } else if (size != 1 && size != have) {
        call.shape_error(operand_name(call.op, widest) + " is " + to_string(call[widest].shape) + ", " +
                         operand_name(call.op, i) + " is " + to_string(shape) + "; sizes must be equal or 1, dim -" +
                         std::to_string(back) + " has " + std::to_string(have) + " and " + std::to_string(size));
      }
    }
  }
  return out;
}

}  // namespace

int64_t normalise_dim(int64_t dim, int64_t rank) { return dim < 0 ? dim + (rank > 0 ? rank : 1) : dim; }

int64_t checked_dim(const CallTypes& call, int64_t dim, int64_t rank, const std::string& argument) {
  const int64_t span = rank > 0 ? rank : 1;
  if (dim < -span || dim >= span)
    call.shape_error(argument + " is " + std::to_string(dim) + ", " + operand_name(call.op, 0) + " has " +
                     std::to_string(rank) + " dims; " + argument + " must be in [" + std::to_string(-span) + ", " +
                     std::to_string(span - 1) + "]");
  return normalise_dim(dim, rank);
}

int64_t dim_of(const Attributes& attrs, int64_t rank, std::string_view name) {
  return normalise_dim(attrs.get_int(name), rank);
}

Dims broadcast_all(const CallTypes& call) {
  std::vector<size_t> operands;
  for (size_t i = 0; i < call.inputs.size(); ++i) operands.push_back(i);
  return broadcast_operands(call, operands);
}

Dims broadcast_some(const CallTypes& call, std::initializer_list<size_t> operands) {
  return broadcast_operands(call, operands);
}

std::string operand_name(const OpDef& op, size_t i) {
  if (op.operands.empty()) return "operand " + std::to_string(i);
  const size_t last = op.operands.size() - 1;
  if (i >= last && op.operands[last].need == Need::variadic)
    return op.operands[last].name + "[" + std::to_string(i - last) + "]";
  return i <= last ? op.operands[i].name : "operand " + std::to_string(i);
}

void need_integer(const CallTypes& call, size_t i) {
  if (!is_integer(call[i].dtype))
    call.type_error(operand_name(call.op, i) + " is " + std::string(dtype_name(call[i].dtype)) + ", needed an integer dtype");
}

void need_bool(const CallTypes& call, size_t i) {
  if (call[i].dtype != DType::boolean)
    call.type_error(operand_name(call.op, i) + " is " + std::string(dtype_name(call[i].dtype)) + ", needed bool");
}

void need_same_dtype(const CallTypes& call, size_t i, size_t j) {
  if (call[i].dtype != call[j].dtype)
    call.type_error(operand_name(call.op, j) + " is " + std::string(dtype_name(call[j].dtype)) + ", " +
                    operand_name(call.op, i) + " is " + std::string(dtype_name(call[i].dtype)) + "; needed the same dtype");
}

void need_float(const CallTypes& call, size_t i) {
  if (!is_float(call[i].dtype))
    call.type_error(operand_name(call.op, i) + " is " + std::string(dtype_name(call[i].dtype)) + ", needed a float dtype");
}

}  // namespace fulmen
