#include "conformance/compare.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

namespace fulmen::conformance {
namespace {

double epsilon_of(DType dtype) {
  switch (dtype) {
    case DType::bf16: return 0x1p-8;
    case DType::f16: return 0x1p-11;
    case DType::f32: return 0x1p-24;
    default: return 0x1p-53;
  }
}

std::string text_of(double value) {
  char buffer[40];
  std::snprintf(buffer, sizeof buffer, "%.9g", value);
  return buffer;
}

}  // namespace

std::string difference(const HostTensor& found, const HostTensor& exact, const HostTensor& rounded, double slack) {
  const DType dtype = found.type.dtype;
  const auto element = [](int64_t k, const std::string& is, const std::string& needed) {
    return "element " + std::to_string(k) + " is " + is + ", " + needed + " is right";
  };
  if (!is_float(dtype)) {
    for (size_t k = 0; k < exact.i.size(); ++k)
      if (found.i[k] != exact.i[k]) return element(static_cast<int64_t>(k), std::to_string(found.i[k]), std::to_string(exact.i[k]));
    return {};
  }
  double largest = 0, reference_error = 0;
  for (size_t k = 0; k < exact.f.size(); ++k) {
    if (!std::isfinite(exact.f[k]) || !std::isfinite(rounded.f[k])) continue;
    largest = std::max(largest, std::abs(exact.f[k]));
    reference_error = std::max(reference_error, std::abs(exact.f[k] - rounded.f[k]));
  }
  // Results that are sums of larger parts (a difference of means) have no fewer bits lost than those of size 1.
  const double budget = slack * std::max(2 * reference_error, 8 * epsilon_of(dtype) * std::max(largest, 1.0));
  for (size_t k = 0; k < exact.f.size(); ++k) {
    const double is = found.f[k], right = rounded.f[k];
    bool good = std::isnan(right) ? std::isnan(is) : std::isinf(right) ? is == right : std::abs(is - exact.f[k]) <= budget;
    if (!good) return element(static_cast<int64_t>(k), text_of(is), text_of(std::isfinite(right) ? exact.f[k] : right));
  }
  return {};
}

}  // namespace fulmen::conformance
