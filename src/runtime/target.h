// What code is compiled for: this machine's CPU, a GPU at hand, or a described device that isn't here.
#pragma once

#include <string>
#include <vector>

#include "core/tensor_type.h"

namespace fulmen {

struct Target {
  std::string name = "cpu";  // "cpu", "cuda:0", "h200", a file's stem
  DeviceKind kind = DeviceKind::cpu;
  int device_index = 0;    // of a device at hand
  bool described = false;  // a JSON description: plans can be proven, not run
  bool derived = false;    // the description was edited from another device's by hand: likely, not proven
  int compute_capability = 0;  // 90 for sm_90; CUDA only
  std::string description;     // the device's JSON as cuDNN takes it; empty for the CPU
};

}  // namespace fulmen
