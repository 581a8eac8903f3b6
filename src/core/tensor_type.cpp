#include "core/tensor_type.h"

#include <algorithm>
#include <charconv>

#include "core/error.h"

namespace fulmen {

std::string to_string(Device device) {
  switch (device.kind) {
    case DeviceKind::cpu: return "cpu";
    case DeviceKind::cuda: return "cuda:" + std::to_string(device.index);
    case DeviceKind::meta: return "meta";
  }
  return "cpu";
}

int64_t element_count(const Dims& shape) {
  int64_t count = 1;
  for (int64_t size : shape) count *= size;
  return count;
}

int64_t TensorType::element_count() const { return fulmen::element_count(shape); }

Dims contiguous_strides(const Dims& shape) {
  Dims strides(shape.size());
  int64_t stride = 1;
  for (size_t i = shape.size(); i-- > 0;) {
    strides[i] = stride;
    stride *= shape[i] > 0 ? shape[i] : 1;
  }
  return strides;
}

bool TensorType::is_contiguous() const {
  int64_t expected = 1;
  for (size_t i = shape.size(); i-- > 0;) {
    if (shape[i] == 0) return true;
    if (shape[i] == 1) continue;
    if (strides[i] != expected) return false;
    expected *= shape[i];
  }
  return true;
}

TensorType contiguous_type(DType dtype, Dims shape, Device device) {
  TensorType type;
  type.dtype = dtype;
  type.strides = contiguous_strides(shape);
  type.shape = std::move(shape);
  type.device = device;
  return type;
}

int64_t span_elements(const Dims& shape, const Dims& strides) {
  int64_t span = 1;
  for (size_t i = 0; i < shape.size(); ++i) {
    if (shape[i] == 0) return 0;
    span += (shape[i] - 1) * (strides[i] < 0 ? -strides[i] : strides[i]);
  }
  return span;
}

std::string to_string(const Dims& dims) {
  std::string text = "[";
  for (size_t i = 0; i < dims.size(); ++i) {
    if (i) text += ',';
    text += std::to_string(dims[i]);
  }
  return text + "]";
}

std::string to_string(const TensorType& type) {
  std::string text(dtype_name(type.dtype));
  text += to_string(type.shape);
  if (!type.is_contiguous()) {
    text += "{stride=";
    for (size_t i = 0; i < type.strides.size(); ++i) {
      if (i) text += ',';
      text += std::to_string(type.strides[i]);
    }
    text += '}';
  }
  if (type.requires_grad) text += '!';
  return text;
}

namespace {

// Reads "a,b,c" up to `end`; empty text is an empty list.
Dims parse_dims(std::string_view body, std::string_view whole) {
  Dims dims;
  while (!body.empty()) {
    while (!body.empty() && body.front() == ' ') body.remove_prefix(1);
    int64_t value = 0;
    const auto [rest, status] = std::from_chars(body.data(), body.data() + body.size(), value);
    if (status != std::errc())
      throw ShapeError("tensor spec: '" + std::string(whole) + "' has '" + std::string(body) + "' where a number is needed");
    dims.push_back(value);
    body.remove_prefix(static_cast<size_t>(rest - body.data()));
    while (!body.empty() && body.front() == ' ') body.remove_prefix(1);
    if (body.empty()) break;
    if (body.front() != ',' || body.size() == 1)
      throw ShapeError("tensor spec: '" + std::string(whole) + "' has '" + std::string(body) + "' where ',' and a number, or the end of the list, is needed");
    body.remove_prefix(1);
  }
  return dims;
}

}  // namespace

TensorType parse_tensor_spec(std::string_view text) {
  const std::string_view whole = text;
  while (!text.empty() && text.front() == ' ') text.remove_prefix(1);
  while (!text.empty() && text.back() == ' ') text.remove_suffix(1);
  const size_t open = text.find('[');
  if (open == std::string_view::npos)
    throw ShapeError("tensor spec: '" + std::string(whole) + "' has no '['; a spec looks like bf16[2,32,4096,128]");
  const auto dtype = parse_dtype(text.substr(0, open));
  if (!dtype)
    throw TypeError("tensor spec: '" + std::string(text.substr(0, open)) +
                    "' is not a dtype; known: bool u8 i8 i16 i32 i64 f16 bf16 f32 f64");
  const size_t close = text.find(']', open);
  if (close == std::string_view::npos) throw ShapeError("tensor spec: '" + std::string(whole) + "' has no ']'");
  TensorType type = contiguous_type(*dtype, parse_dims(text.substr(open + 1, close - open - 1), whole));
  for (int64_t size : type.shape)
    if (size < 0)
      throw ShapeError("tensor spec: '" + std::string(whole) + "' has size " + std::to_string(size) + "; sizes are 0 or more");
  // An exact element count must fit: everything behind this relies on 64-bit products.
  __int128 count = 1;
  for (int64_t size : type.shape) {
    count *= size;
    if (count > INT64_MAX / 16)
      throw ShapeError("tensor spec: '" + std::string(whole) + "' has too many elements for a 64-bit address");
  }
  text.remove_prefix(close + 1);
  constexpr std::string_view stride_key = "{stride=";
  if (text.starts_with(stride_key)) {
    const size_t end = text.find('}');
    if (end == std::string_view::npos) throw ShapeError("tensor spec: '" + std::string(whole) + "' has no '}'");
    type.strides = parse_dims(text.substr(stride_key.size(), end - stride_key.size()), whole);
    for (int64_t stride : type.strides)
      if (stride < 0) throw ShapeError("tensor spec: '" + std::string(whole) + "' has stride " + std::to_string(stride) + "; strides are 0 or more");
    if (type.strides.size() != type.shape.size())
      throw ShapeError("tensor spec: '" + std::string(whole) + "' has " + std::to_string(type.strides.size()) +
                       " strides for " + std::to_string(type.shape.size()) + " dims");
    __int128 span = 1;
    for (size_t d = 0; d < type.shape.size(); ++d) span += static_cast<__int128>(std::max<int64_t>(type.shape[d] - 1, 0)) * type.strides[d];
    if (span > INT64_MAX / 16)
      throw ShapeError("tensor spec: '" + std::string(whole) + "' spans too many elements for a 64-bit address");
    text.remove_prefix(end + 1);
  }
  if (text == "!") {
    type.requires_grad = true;
    text = {};
  }
  if (!text.empty())
    throw ShapeError("tensor spec: '" + std::string(whole) + "' ends in '" + std::string(text) + "', which is not understood");
  return type;
}

}  // namespace fulmen
