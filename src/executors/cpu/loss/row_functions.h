// One row of logits at a time, vectorised; one table an instruction set. Used by loss/cross_entropy.cpp.
#pragma once

#include <cstdint>

#include "executors/cpu/dispatch.h"

namespace fulmen::cpu {

template <class T>
struct RowFunctions {
  // log(sum(exp(x))); NaN if a logit is NaN or +inf, or all are -inf. `sum` gets the sum of x if not null.
  float (*log_sum_exp)(const T* x, int64_t count, float* sum) = nullptr;
  // out = (exp(x - lse) - share) * scale
  void (*gradient)(const T* x, T* out, int64_t count, float lse, float share, float scale) = nullptr;
};

// T: float, bf16, f16
template <class T>
const RowFunctions<T>& row_functions(Isa isa);

}  // namespace fulmen::cpu
