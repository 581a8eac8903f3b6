// What is known of a tensor before it exists: dtype, shape, strides, device, gradient need.
// The text form (a "tensor spec") is used by traces, the command line and messages:
//   bf16[2,32,4096,128]                              contiguous
//   bf16[2,32,4096,128]{stride=16777216,128,4096,1}  strided, in elements
//   bf16[1,16,2048,2048]!                            wants a gradient
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/dtype.h"

namespace fulmen {

using Dims = std::vector<int64_t>;

enum class DeviceKind : uint8_t { cpu, cuda, meta };

struct Device {
  DeviceKind kind = DeviceKind::cpu;
  int index = 0;
  bool operator==(const Device&) const = default;
};

std::string to_string(Device device);  // "cpu", "cuda:0", "meta"

struct TensorType {
  DType dtype = DType::f32;
  Dims shape;
  Dims strides;  // in elements, one a dim
  Device device;
  bool requires_grad = false;
  // A Python number that became a 0-dim value: it takes part in promotion by category only.
  bool is_number = false;

  bool operator==(const TensorType&) const = default;
  int rank() const { return static_cast<int>(shape.size()); }
  int64_t element_count() const;
  size_t bytes() const { return static_cast<size_t>(element_count()) * dtype_bytes(dtype); }
  bool is_contiguous() const;
};

Dims contiguous_strides(const Dims& shape);
int64_t element_count(const Dims& shape);
TensorType contiguous_type(DType dtype, Dims shape, Device device = {});

// Elements from the lowest to the highest address a strided tensor touches, 0 if it is empty.
int64_t span_elements(const Dims& shape, const Dims& strides);

std::string to_string(const Dims& dims);  // "[2,3]"
std::string to_string(const TensorType& type);

// Throws TypeError or ShapeError that names the faulty part of the text.
TensorType parse_tensor_spec(std::string_view text);

}  // namespace fulmen
