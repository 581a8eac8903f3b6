// Element types, their names in text and their properties. 16-bit float conversions are in core/half.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace fulmen {

enum class DType : uint8_t { boolean, u8, i8, i16, i32, i64, f16, bf16, f32, f64 };

inline constexpr int dtype_count = 10;

// "bool", "u8", "i8", "i16", "i32", "i64", "f16", "bf16", "f32", "f64"
std::string_view dtype_name(DType dtype);

// Accepts Fulmen's names and PyTorch's ("float32", "bfloat16", "int64", ...).
std::optional<DType> parse_dtype(std::string_view text);

constexpr size_t dtype_bytes(DType dtype) {
  switch (dtype) {
    case DType::boolean:
    case DType::u8:
    case DType::i8: return 1;
    case DType::i16:
    case DType::f16:
    case DType::bf16: return 2;
    case DType::i32:
    case DType::f32: return 4;
    case DType::i64:
    case DType::f64: return 8;
  }
  return 0;
}

constexpr bool is_float(DType dtype) { return dtype >= DType::f16; }
constexpr bool is_half(DType dtype) { return dtype == DType::f16 || dtype == DType::bf16; }
constexpr bool is_integer(DType dtype) { return dtype >= DType::u8 && dtype <= DType::i64; }

// PyTorch's promotion of two tensor dtypes (the category rules for 0-dim tensors and
// numbers are in ops/promotion.h).
DType promote_dtypes(DType a, DType b);

}  // namespace fulmen
