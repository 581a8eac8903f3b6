// The descriptions of GPUs that Fulmen ships, in the JSON that cuDNN takes for a device that isn't here. Only the H200's
// was read from a real device; the others are that one edited by hand from public data sheets and marked `derived`:
// answers for them are likely, not proven.
#pragma once

#include <span>
#include <string_view>

namespace fulmen {

struct ShippedTarget {
  std::string_view name;
  int compute_capability;
  bool derived;
  std::string_view json;
};

std::span<const ShippedTarget> shipped_targets();

}  // namespace fulmen
