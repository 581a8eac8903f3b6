// Memory for one tensor, laid out by its strides, with canary bytes before, after and in the gaps.
#pragma once

#include <vector>

#include "ops/op_def.h"

namespace fulmen::conformance {

class StridedMemory {
 public:
  // Filled with canaries; the elements from `values` if given.
  StridedMemory(TensorType type, const HostTensor* values);

  void* data() { return bytes_.data() + margin; }
  const TensorType& type() const { return type_; }
  HostTensor read() const;
  bool canaries_intact() const;  // every byte that isn't an element's
  bool unchanged() const { return bytes_ == original_; }
  bool equals(const StridedMemory& other) const { return bytes_ == other.bytes_; }

 private:
  static constexpr size_t margin = 64;
  TensorType type_;
  std::vector<unsigned char> bytes_, original_;
  std::vector<bool> is_element_;
};

}  // namespace fulmen::conformance
