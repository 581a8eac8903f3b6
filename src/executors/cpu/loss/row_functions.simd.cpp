#include "executors/cpu/loss/row_functions.h"

#include "executors/cpu/vec_math.h"

namespace fulmen::cpu::FULMEN_TARGET {
namespace {

// Calls f(vector) for each group of lanes of the row, four accumulators apart; what is missing at the end is `fill`.
template <class T, class F>
FULMEN_INLINE void for_each_vector(const T* x, int64_t count, float fill, F&& f) {
  int64_t i = 0;
  for (; i + 4 * lanes <= count; i += 4 * lanes)
    for (int k = 0; k < 4; ++k) f(k, load(x + i + k * lanes));
  for (int k = 0; i < count; i += lanes, ++k)
    f(k, i + lanes <= count ? load(x + i) : load_partial(x + i, static_cast<int>(count - i), fill));
}

template <class T>
float log_sum_exp(const T* x, int64_t count, float* sum) {
  constexpr float lowest = -std::numeric_limits<float>::infinity();
  vfloat high[4] = {splat(lowest), splat(lowest), splat(lowest), splat(lowest)};
  for_each_vector(x, count, lowest, [&](int k, vfloat v) { high[k] = max(high[k], v); });
  const float top = reduce_max(max(max(high[0], high[1]), max(high[2], high[3])));
  const vfloat top_lanes = splat(top);
  vfloat powers[4] = {};
  // A NaN is not seen by max above; exp carries it on.
  for_each_vector(x, count, lowest, [&](int k, vfloat v) { powers[k] += fast_exp(v - top_lanes); });
  const float total = reduce_add((powers[0] + powers[1]) + (powers[2] + powers[3]));
  if (sum) {
    vfloat sums[4] = {};
    for_each_vector(x, count, 0.0f, [&](int k, vfloat v) { sums[k] += v; });
    *sum = reduce_add((sums[0] + sums[1]) + (sums[2] + sums[3]));
  }
  return top + std::log(total);
}

template <class T>
void gradient(const T* x, T* out, int64_t count, float lse, float share, float scale) {
  const vfloat shift = splat(lse), less = splat(share), factor = splat(scale);
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) store(out + i, (fast_exp(load(x + i) - shift) - less) * factor);
  if (i < count) {
    const int rest = static_cast<int>(count - i);
    store_partial(out + i, (fast_exp(load_partial(x + i, rest) - shift) - less) * factor, rest);
  }
}

}  // namespace

template <class T>
RowFunctions<T> row_table() {
  return {log_sum_exp<T>, gradient<T>};
}
template RowFunctions<float> row_table<float>();
template RowFunctions<bf16> row_table<bf16>();
template RowFunctions<f16> row_table<f16>();

}  // namespace fulmen::cpu::FULMEN_TARGET
