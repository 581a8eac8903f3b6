#include "core/dtype.h"

#include <array>

namespace fulmen {
namespace {

struct DTypeNames {
  std::string_view name;
  std::string_view torch_name;
};

constexpr std::array<DTypeNames, dtype_count> names = {{
    {"bool", "bool"},
    {"u8", "uint8"},
    {"i8", "int8"},
    {"i16", "int16"},
    {"i32", "int32"},
    {"i64", "int64"},
    {"f16", "float16"},
    {"bf16", "bfloat16"},
    {"f32", "float32"},
    {"f64", "float64"},
}};

}  // namespace

std::string_view dtype_name(DType dtype) { return names[static_cast<size_t>(dtype)].name; }

std::optional<DType> parse_dtype(std::string_view text) {
  if (text.starts_with("torch.")) text.remove_prefix(6);
  for (size_t i = 0; i < names.size(); ++i)
    if (text == names[i].name || text == names[i].torch_name) return static_cast<DType>(i);
  if (text == "float" || text == "fp32") return DType::f32;
  if (text == "double" || text == "fp64") return DType::f64;
  if (text == "half" || text == "fp16") return DType::f16;
  return std::nullopt;
}

DType promote_dtypes(DType a, DType b) {
  if (a == b) return a;
  if (is_float(a) && is_float(b)) {
    if (is_half(a) && is_half(b)) return DType::f32;
    return a > b ? a : b;
  }
  if (is_float(a)) return a;
  if (is_float(b)) return b;
  if (a == DType::boolean) return b;
  if (b == DType::boolean) return a;
  if (a == DType::u8 || b == DType::u8) {
    const DType other = a == DType::u8 ? b : a;
    return other == DType::i8 ? DType::i16 : other;
  }
  return a > b ? a : b;
}

}  // namespace fulmen
