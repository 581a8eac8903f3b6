// A tensor in host memory for C++ programs: contiguous, shared by copies, 64-byte aligned. Shapes are in elements.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <vector>

namespace fulmen {

using Shape = std::vector<int64_t>;

class Tensor {
 public:
  Tensor() = default;
  // dtype: "f32", "bf16", "f16", "f64", "i64", "i32", "u8", "bool", ...; the memory is set to zero.
  // Throws TypeError for an unknown dtype and ShapeError for a negative size.
  explicit Tensor(Shape shape, std::string dtype = "f32");
  // Copies element_count(shape) values; ShapeError if there are more or fewer.
  Tensor(Shape shape, const std::vector<float>& values);
  Tensor(Shape shape, const std::vector<int64_t>& values);

  const Shape& shape() const { return shape_; }
  const std::string& dtype() const { return dtype_; }
  int64_t element_count() const;
  size_t bytes() const;

  // The elements; TypeError if T isn't the dtype's C++ type (float for f32, int64_t for i64, ...; void for any).
  template <class T>
  T* data() {
    check_element_type(sizeof(T), kind_of<T>());
    return static_cast<T*>(memory_.get());
  }
  template <class T>
  const T* data() const {
    return const_cast<Tensor*>(this)->data<T>();
  }
  void* raw() { return memory_.get(); }
  const void* raw() const { return memory_.get(); }

 private:
  template <class T>
  static char kind_of() {
    return std::is_floating_point_v<T> ? 'f' : std::is_same_v<T, bool> ? 'b' : std::is_unsigned_v<T> ? 'u' : 'i';
  }
  void check_element_type(size_t size, char kind) const;

  Shape shape_;
  std::string dtype_ = "f32";
  std::shared_ptr<void> memory_;
};

}  // namespace fulmen
