// The public C++ tensor (include/fulmen/tensor.h).
#include <cstdlib>
#include <cstring>

#include "core/error.h"
#include "core/tensor_type.h"
#include "fulmen/tensor.h"

namespace fulmen {
namespace {

DType dtype_of(const std::string& name) {
  const auto dtype = parse_dtype(name);
  if (!dtype) throw TypeError("tensor: '" + name + "' is not a dtype; known: bool u8 i8 i16 i32 i64 f16 bf16 f32 f64");
  return *dtype;
}

}  // namespace

Tensor::Tensor(Shape shape, std::string dtype) : shape_(std::move(shape)), dtype_(dtype_name(dtype_of(dtype))) {
  for (int64_t size : shape_)
    if (size < 0) throw ShapeError("tensor: a size is " + std::to_string(size) + "; sizes are 0 or more");
  const size_t size = (bytes() + 63) / 64 * 64;
  void* memory = std::aligned_alloc(64, size ? size : 64);
  if (!memory) throw DeviceError("tensor: the machine has no " + std::to_string(size) + " bytes left");
  std::memset(memory, 0, size ? size : 64);
  memory_ = std::shared_ptr<void>(memory, std::free);
}

Tensor::Tensor(Shape shape, const std::vector<float>& values) : Tensor(std::move(shape), "f32") {
  if (static_cast<int64_t>(values.size()) != element_count())
    throw ShapeError("tensor: " + std::to_string(values.size()) + " values for shape " + to_string(shape_));
  std::memcpy(memory_.get(), values.data(), bytes());
}

Tensor::Tensor(Shape shape, const std::vector<int64_t>& values) : Tensor(std::move(shape), "i64") {
  if (static_cast<int64_t>(values.size()) != element_count())
    throw ShapeError("tensor: " + std::to_string(values.size()) + " values for shape " + to_string(shape_));
  std::memcpy(memory_.get(), values.data(), bytes());
}

int64_t Tensor::element_count() const { return fulmen::element_count(shape_); }
size_t Tensor::bytes() const { return static_cast<size_t>(element_count()) * dtype_bytes(dtype_of(dtype_)); }

void Tensor::check_element_type(size_t size, char kind) const {
  const DType dtype = dtype_of(dtype_);
  const char own = dtype == DType::boolean ? 'b' : is_float(dtype) ? 'f' : dtype == DType::u8 ? 'u' : 'i';
  // 16-bit floats have no C++ type here; they are read as raw 16-bit integers.
  const bool half_as_bits = is_half(dtype) && size == 2;
  if (!half_as_bits && (own != kind || size != dtype_bytes(dtype)))
    throw TypeError("tensor: data of " + dtype_ + " was asked for as a " + std::to_string(8 * size) + "-bit " +
                    (kind == 'f' ? "float" : kind == 'b' ? "bool" : "integer"));
}

}  // namespace fulmen
