#include "executors/reference/host_memory.h"

#include "ops/reference_loops.h"

namespace fulmen::reference {
namespace {

template <class T>
double widen(T value) {
  return static_cast<double>(value);
}
double widen(f16 value) { return static_cast<double>(static_cast<float>(value)); }
double widen(bf16 value) { return static_cast<double>(static_cast<float>(value)); }

template <class T>
T narrow(double value) {
  return static_cast<T>(value);
}
template <>
f16 narrow<f16>(double value) {
  return f16(static_cast<float>(value));
}
template <>
bf16 narrow<bf16>(double value) {
  return bf16(static_cast<float>(value));
}

template <class T>
void load_floats(HostTensor& host, const TensorType& type, const void* memory) {
  const T* elements = static_cast<const T*>(memory);
  for_each_index(type.shape, [&](const Dims& index, int64_t linear) {
    host.f[static_cast<size_t>(linear)] = widen(elements[linear_index(index, type.strides)]);
  });
}
template <class T>
void load_integers(HostTensor& host, const TensorType& type, const void* memory) {
  const T* elements = static_cast<const T*>(memory);
  for_each_index(type.shape, [&](const Dims& index, int64_t linear) {
    host.i[static_cast<size_t>(linear)] = static_cast<int64_t>(elements[linear_index(index, type.strides)]);
  });
}
template <class T>
void store_floats(const HostTensor& host, const TensorType& type, void* memory) {
  T* elements = static_cast<T*>(memory);
  for_each_index(type.shape, [&](const Dims& index, int64_t linear) {
    elements[linear_index(index, type.strides)] = narrow<T>(host.f[static_cast<size_t>(linear)]);
  });
}
template <class T>
void store_integers(const HostTensor& host, const TensorType& type, void* memory) {
  T* elements = static_cast<T*>(memory);
  for_each_index(type.shape, [&](const Dims& index, int64_t linear) {
    elements[linear_index(index, type.strides)] = static_cast<T>(wrap_integer(host.i[static_cast<size_t>(linear)], type.dtype));
  });
}

}  // namespace

HostTensor load(const TensorType& type, const void* memory) {
  HostTensor host = make_host(type);
  switch (type.dtype) {
    case DType::boolean:
    case DType::u8: load_integers<uint8_t>(host, type, memory); break;
    case DType::i8: load_integers<int8_t>(host, type, memory); break;
    case DType::i16: load_integers<int16_t>(host, type, memory); break;
    case DType::i32: load_integers<int32_t>(host, type, memory); break;
    case DType::i64: load_integers<int64_t>(host, type, memory); break;
    case DType::f16: load_floats<f16>(host, type, memory); break;
    case DType::bf16: load_floats<bf16>(host, type, memory); break;
    case DType::f32: load_floats<float>(host, type, memory); break;
    case DType::f64: load_floats<double>(host, type, memory); break;
  }
  if (type.dtype == DType::boolean)
    for (int64_t& value : host.i) value = value != 0;
  return host;
}

void store(const HostTensor& host, const TensorType& type, void* memory) {
  FULMEN_CHECK(host.type.shape == type.shape && host.type.dtype == type.dtype);
  switch (type.dtype) {
    case DType::boolean:
    case DType::u8: store_integers<uint8_t>(host, type, memory); break;
    case DType::i8: store_integers<int8_t>(host, type, memory); break;
    case DType::i16: store_integers<int16_t>(host, type, memory); break;
    case DType::i32: store_integers<int32_t>(host, type, memory); break;
    case DType::i64: store_integers<int64_t>(host, type, memory); break;
    case DType::f16: store_floats<f16>(host, type, memory); break;
    case DType::bf16: store_floats<bf16>(host, type, memory); break;
    case DType::f32: store_floats<float>(host, type, memory); break;
    case DType::f64: store_floats<double>(host, type, memory); break;
  }
}

}  // namespace fulmen::reference
