// Memory for one tensor, laid out by its strides, with canary bytes before, after and in the gaps; and running one call
// of an executor on such memory.
#pragma once

#include <vector>

#include "executors/executor.h"
#include "ops/op_def.h"

namespace fulmen::table {

class StridedMemory {
 public:
  // Filled with canaries; the elements from `values` if given.
  StridedMemory(TensorType type, const HostTensor* values);

  void* data() { return bytes_.data() + margin; }
  const TensorType& type() const { return type_; }
  HostTensor read() const;
  bool canaries_intact() const;  // every byte that isn't an element's
  bool unchanged() const { return bytes_ == original_; }

 private:
  static constexpr size_t margin = 64;
  TensorType type_;
  std::vector<unsigned char> bytes_, original_;
  std::vector<bool> is_element_;
};

// Claims and runs the one node of `trace`; a refusal is a test failure. Gives false then.
bool run_call(const Executor& executor, const Trace& trace, const Target& target, std::vector<StridedMemory>& inputs,
              std::vector<StridedMemory>& outputs);

}  // namespace fulmen::table
