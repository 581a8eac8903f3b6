// Runs the plans of one claimed call: conversions before and after, workspace, and the plans themselves, all on the
// caller's stream. shared_kernel.cpp has the one for plans that many lengths share.
#pragma once

#include <memory>
#include <optional>

#include "executors/cudnn/cudnn.h"
#include "executors/cudnn/plans.h"

namespace fulmen::cudnn {

// What a claim on a GPU at hand keeps beyond its problem.
struct DevicePlans {
  std::shared_ptr<Plans> plans;  // keeps handles and counters alive
  std::shared_ptr<Converter> converter;
  std::shared_ptr<const DevicePlan> forward, backward;
  std::optional<Problem> shared;  // what the plans are of, where it isn't the claim's own problem
};

// Hands out aligned pieces of the caller's workspace; without one it only adds up.
class Pieces {
 public:
  explicit Pieces(void* base) : base_(static_cast<char*>(base)) {}
  void* take(size_t bytes) {
    constexpr size_t alignment = 256;
    void* piece = base_ ? base_ + used_ : nullptr;
    used_ += (bytes + alignment - 1) / alignment * alignment;
    return piece;
  }
  size_t used() const { return used_; }

 private:
  char* base_;
  size_t used_ = 0;
};

std::shared_ptr<const SdpaKernel> make_device_kernel(std::shared_ptr<const ClaimedProblem> claimed,
                                                     std::shared_ptr<const DevicePlans> plans, int device);
std::shared_ptr<const SdpaKernel> make_shared_kernel(std::shared_ptr<const ClaimedProblem> claimed,
                                                     std::shared_ptr<const DevicePlans> plans, int device);

}  // namespace fulmen::cudnn
