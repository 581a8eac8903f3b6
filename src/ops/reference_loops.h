// Loops over HostTensors for the reference meaning of primitives: every index of a shape, several operands broadcast
// to one shape, one dim as a line. Plain and slow on purpose. What an op computes stands in its family's file.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "core/half.h"
#include "ops/op_def.h"

namespace fulmen {

// A contiguous tensor of zeros with this dtype and shape.
inline HostTensor make_host(const TensorType& type) {
  HostTensor host;
  host.type = contiguous_type(type.dtype, type.shape, type.device);
  const auto count = static_cast<size_t>(host.type.element_count());
  if (is_float(type.dtype))
    host.f.assign(count, 0.0);
  else
    host.i.assign(count, 0);
  return host;
}
inline HostTensor make_host(DType dtype, const Dims& shape) { return make_host(contiguous_type(dtype, shape)); }

// The integer that is left when `value` is stored in `dtype`: two's complement, true is 1.
inline int64_t wrap_integer(int64_t value, DType dtype) {
  switch (dtype) {
    case DType::boolean: return value != 0;
    case DType::u8: return static_cast<uint8_t>(value);
    case DType::i8: return static_cast<int8_t>(value);
    case DType::i16: return static_cast<int16_t>(value);
    case DType::i32: return static_cast<int32_t>(value);
    default: return value;
  }
}

// The double that is left when `value` is stored in a float dtype.
inline double round_float(double value, DType dtype) {
  switch (dtype) {
    case DType::f16: return static_cast<double>(static_cast<float>(f16(static_cast<float>(value))));
    case DType::bf16: return static_cast<double>(static_cast<float>(bf16(static_cast<float>(value))));
    case DType::f32: return static_cast<double>(static_cast<float>(value));
    default: return value;
  }
}

// Truncates towards zero; what has no integer (NaN, too large) becomes the lowest i64, as x86 conversions do.
inline int64_t integer_of(double value) {
  if (!(value > -9223372036854775808.0 && value < 9223372036854775808.0)) return std::numeric_limits<int64_t>::min();
  return static_cast<int64_t>(value);
}

// Element k of `from` into element j of `to`, converted to its dtype; floats aren't rounded.
inline void copy_element(const HostTensor& from, int64_t k, HostTensor& to, int64_t j) {
  const auto s = static_cast<size_t>(k), d = static_cast<size_t>(j);
  const bool from_float = is_float(from.type.dtype);
  if (is_float(to.type.dtype)) {
    to.f[d] = from_float ? from.f[s] : static_cast<double>(from.i[s]);
  } else if (to.type.dtype == DType::boolean) {
    to.i[d] = from_float ? from.f[s] != 0.0 : from.i[s] != 0;
  } else {
    to.i[d] = wrap_integer(from_float ? integer_of(from.f[s]) : from.i[s], to.type.dtype);
  }
}

// body(index, linear) for every index of `shape`, last dim fastest; once for shape [].
template <class F>
void for_each_index(const Dims& shape, F&& body) {
  const int64_t count = element_count(shape);
  Dims index(shape.size(), 0);
  for (int64_t linear = 0; linear < count; ++linear) {
    body(static_cast<const Dims&>(index), linear);
    for (size_t d = shape.size(); d-- > 0;) {
      if (++index[d] < shape[d]) break;
      index[d] = 0;
    }
  }
}

inline int64_t linear_index(const Dims& index, const Dims& strides) {
  int64_t at = 0;
  for (size_t d = 0; d < index.size(); ++d) at += index[d] * strides[d];
  return at;
}

// Strides with which a contiguous tensor of `shape` is read as if it had shape `out` (aligned at the last dim).
inline Dims broadcast_strides(const Dims& shape, const Dims& out) {
  Dims strides(out.size(), 0);
  const Dims own = contiguous_strides(shape);
  const size_t lead = out.size() - shape.size();
  for (size_t d = 0; d < shape.size(); ++d)
    if (shape[d] != 1) strides[lead + d] = own[d];
  return strides;
}

// body(linear, offsets) for every element of `out`; offsets[i] is the element of operand i (contiguous, of shapes[i],
// broadcast to `out`) that belongs there. A null shape gives offset 0.
template <class F>
void for_each_broadcast(const Dims& out, const std::vector<const Dims*>& shapes, F&& body) {
  std::vector<Dims> strides;
  strides.reserve(shapes.size());
  for (const Dims* shape : shapes) strides.push_back(shape ? broadcast_strides(*shape, out) : Dims(out.size(), 0));
  std::vector<int64_t> offsets(shapes.size());
  for_each_index(out, [&](const Dims& index, int64_t linear) {
    for (size_t i = 0; i < offsets.size(); ++i) offsets[i] = linear_index(index, strides[i]);
    body(linear, static_cast<const std::vector<int64_t>&>(offsets));
  });
}

// A shape seen as (outer, size, inner) around one dim; element (o, k, n) is at (o * size + k) * inner + n.
struct DimView {
  int64_t outer = 1, size = 1, inner = 1;
  int64_t at(int64_t o, int64_t k, int64_t n) const { return (o * size + k) * inner + n; }
};
inline DimView view_around(const Dims& shape, int64_t dim) {
  DimView view;
  for (size_t d = 0; d < shape.size(); ++d) {
    const auto at = static_cast<int64_t>(d);
    if (at < dim)
      view.outer *= shape[d];
    else if (at == dim)
      view.size = shape[d];
    else
      view.inner *= shape[d];
  }
  return view;
}

}  // namespace fulmen
