// Runs the plans of one claimed call: conversions before and after, workspace, and the plans themselves, all on the
// caller's stream.
#pragma once

#include <memory>

#include "executors/cudnn/cudnn.h"
#include "executors/cudnn/plans.h"

namespace fulmen::cudnn {

// What a claim on a GPU at hand keeps beyond its problem.
struct DevicePlans {
  std::shared_ptr<Plans> plans;  // keeps handles and counters alive
  std::shared_ptr<Converter> converter;
  std::shared_ptr<const DevicePlan> forward, backward;
};

std::shared_ptr<const SdpaKernel> make_device_kernel(std::shared_ptr<const ClaimedProblem> claimed,
                                                     std::shared_ptr<const DevicePlans> plans, int device);

}  // namespace fulmen::cudnn
