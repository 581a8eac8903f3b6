#include "conformance/strided_memory.h"

#include "executors/reference/host_memory.h"
#include "ops/reference_loops.h"

namespace fulmen::conformance {
namespace {

constexpr unsigned char canary = 0xA5;

}  // namespace

StridedMemory::StridedMemory(TensorType type, const HostTensor* values) : type_(std::move(type)) {
  const size_t width = dtype_bytes(type_.dtype);
  const auto span = static_cast<size_t>(span_elements(type_.shape, type_.strides)) * width;
  bytes_.assign(span + 2 * margin, canary);
  is_element_.assign(bytes_.size(), false);
  for_each_index(type_.shape, [&](const Dims& index, int64_t) {
    const size_t at = margin + static_cast<size_t>(linear_index(index, type_.strides)) * width;
    for (size_t k = 0; k < width; ++k) is_element_[at + k] = true;
  });
  if (values) reference::store(*values, type_, data());
  original_ = bytes_;
}

HostTensor StridedMemory::read() const { return reference::load(type_, bytes_.data() + margin); }

bool StridedMemory::canaries_intact() const {
  for (size_t k = 0; k < bytes_.size(); ++k)
    if (!is_element_[k] && bytes_[k] != canary) return false;
  return true;
}

}  // namespace fulmen::conformance
