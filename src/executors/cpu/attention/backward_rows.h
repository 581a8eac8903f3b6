// What both backward kernels need of each query row before they begin: delta and the log-sum-exp, in a form that keeps
// its small digits. Compiled per target; used by backward.matrix.cpp and decode_backward.matrix.cpp.
#pragma once

#include <algorithm>
#include <cmath>

#include "core/parallel.h"
#include "executors/cpu/attention/closed_keys.h"
#include "executors/cpu/attention/modes.h"
#include "ops/sdpa_call.h"

namespace fulmen::cpu::FULMEN_TARGET {

// f32 holds a log-sum-exp of a fully masked row (mask values near -1e9 or the lowest number) so coarsely that the sum
// is lost in it, and with it the probabilities. Past this magnitude the two parts are computed again, apart.
inline constexpr float coarse_lse = 4096.0f;

inline void split_lse(const AttentionArguments& a, const AttentionRun& run, const AttentionSegment& segment, int64_t head, int64_t local,
                      float& shift, float& log) {
  const LoneRow row(a, run, segment, head, local);
  const std::vector<float> logits = row.logits();
  const int64_t count = row.count();
  float highest = minus_infinity;
  for (int64_t j = 0; j < count; ++j) highest = std::max(highest, logits[static_cast<size_t>(j)]);
  if (!std::isfinite(highest)) return;
  double sum = a.has_sink ? std::exp(static_cast<double>(static_cast<const float*>(run.inputs[sdpa_sink])[head * a.sink_stride]) - highest) : 0.0;
  for (int64_t j = 0; j < count; ++j) sum += std::exp(static_cast<double>(logits[static_cast<size_t>(j)]) - highest);
  shift = highest;
  log = static_cast<float>(std::log2(sum));
}

// Per batch entry, head and query: p = 2^((s - shift) factor - log), dS = p (dP - delta).
struct BackwardRows {
  float *delta = nullptr, *shift = nullptr, *log = nullptr;

  BackwardRows() = default;
  BackwardRows(Carver& carver, const AttentionArguments& a) {
    delta = carver.take<float>(a.batch * a.heads * a.query_len);
    shift = carver.take<float>(a.batch * a.heads * a.query_len);
    log = carver.take<float>(a.batch * a.heads * a.query_len);
  }

  // each_row(segment, head, local query) is called for every row.
  template <class F>
  void fill(const AttentionArguments& a, const AttentionRun& run, const std::vector<AttentionSegment>& segments, const F& each_row) const {
    std::vector<int64_t> rows_before(1, 0);  // of each segment, all heads
    for (const AttentionSegment& segment : segments) rows_before.push_back(rows_before.back() + a.heads * segment.query_count);
    const int64_t dims = round_up(a.value_dim, lanes);
    parallel_for(rows_before.back(), 64, [&](int64_t begin, int64_t end) {
      std::vector<float> out(static_cast<size_t>(dims)), grad(static_cast<size_t>(dims));
      size_t n = static_cast<size_t>(std::upper_bound(rows_before.begin(), rows_before.end(), begin) - rows_before.begin()) - 1;
      for (int64_t at = begin; at < end; ++at) {
        while (at >= rows_before[n + 1]) ++n;
        const AttentionSegment& segment = segments[n];
        const int64_t head = (at - rows_before[n]) / segment.query_count, local = (at - rows_before[n]) % segment.query_count, query = segment.query_begin + local;
        const Source out_row(run.inputs[sdpa_out], a.out, segment.batch, head, query), grad_row(run.inputs[sdpa_out_grad], a.out_grad, segment.batch, head, query);
        widen_row(out_row.data, out_row.dtype, out_row.col_stride, a.value_dim, dims, 1.0f, out.data());
        widen_row(grad_row.data, grad_row.dtype, grad_row.col_stride, a.value_dim, dims, 1.0f, grad.data());
        vfloat sum{};
        for (int64_t c = 0; c < dims; c += lanes) sum = fma(load(out.data() + c), load(grad.data() + c), sum);
        const int64_t row = (segment.batch * a.heads + head) * a.query_len + query;
        const float lse = static_cast<const float*>(run.inputs[sdpa_lse])[row];
        delta[row] = lse == minus_infinity ? 0.0f : reduce_add(sum);
        shift[row] = lse == minus_infinity ? std::numeric_limits<float>::infinity() : lse;
        log[row] = 0.0f;
        if (std::abs(lse) > coarse_lse && std::isfinite(lse)) split_lse(a, run, segment, head, local, shift[row], log[row]);
        each_row(segment, head, local);
      }
    });
  }

  void write_sink_gradient(const AttentionArguments& a, const AttentionRun& run) const {
    for (int64_t h = 0; h < a.heads; ++h) {
      const float sink = static_cast<const float*>(run.inputs[sdpa_sink])[h * a.sink_stride];
      double sum = 0.0;
      for (int64_t b = 0; b < a.batch; ++b)
        for (int64_t i = 0; i < a.query_len; ++i) {
          const int64_t at = (b * a.heads + h) * a.query_len + i;
          const float lse = static_cast<const float*>(run.inputs[sdpa_lse])[at];
          if (lse != minus_infinity) sum -= static_cast<double>(std::exp(sink - lse)) * delta[at];
        }
      static_cast<float*>(run.outputs[4])[h * a.sink_grad_stride] = static_cast<float>(sum);
    }
  }
};

// A row of the query's gradient that isn't finite, once more without what closed keys hold (closed_keys.h).
inline void clean_query_grad_row(const AttentionArguments& a, const AttentionRun& run, const AttentionSegment& segment, int64_t head,
                                 int64_t local, const DropoutRules& dropout, const BackwardRows& rows, float* grad) {
  const int64_t at = (segment.batch * a.heads + head) * a.query_len + segment.query_begin + local;
  clean_query_grad_row(a, run, segment, head, local, dropout, rows.shift[at], rows.log[at], rows.delta[at], grad);
}

}  // namespace fulmen::cpu::FULMEN_TARGET
