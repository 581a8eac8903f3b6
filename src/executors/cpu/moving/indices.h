// An index tensor as kernels read it: by linear position, checked.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "core/error.h"
#include "core/tensor_type.h"

namespace fulmen::cpu {

// An index tensor of i32 or i64, read by linear position.
class Indices {
 public:
  Indices(const TensorType& type, std::string op) : type_(type), op_(std::move(op)), is_contiguous_(type.is_contiguous()) {}
  int64_t count() const { return type_.element_count(); }
  int64_t offset(int64_t linear) const {
    if (is_contiguous_) return linear;
    int64_t result = 0;
    for (size_t d = type_.shape.size(); d-- > 0;) {
      result += linear % type_.shape[d] * type_.strides[d];
      linear /= type_.shape[d];
    }
    return result;
  }
  int64_t at(const void* memory, int64_t linear) const {
    const int64_t k = offset(linear);
    return type_.dtype == DType::i32 ? static_cast<const int32_t*>(memory)[k] : static_cast<const int64_t*>(memory)[k];
  }
  int64_t row(const void* memory, int64_t linear, int64_t rows) const {
    const int64_t value = at(memory, linear);
    if (value < 0 || value >= rows)
      throw ShapeError(op_ + ": index has " + std::to_string(value) + " at element " + std::to_string(linear) + ", the table has " +
                       std::to_string(rows) + " rows; needed 0 to " + std::to_string(rows - 1));
    return value;
  }
  // Negative positions count from the end.
  int64_t position(const void* memory, int64_t linear, int64_t size) const {
    const int64_t value = at(memory, linear);
    if (value < -size || value >= size)
      throw ShapeError(op_ + ": index has " + std::to_string(value) + ", needed " + std::to_string(-size) + " to " + std::to_string(size - 1));
    return value < 0 ? value + size : value;
  }
  static bool takes(const TensorType& type) { return type.dtype == DType::i32 || type.dtype == DType::i64; }

 private:
  TensorType type_;
  std::string op_;
  bool is_contiguous_;
};

}  // namespace fulmen::cpu
