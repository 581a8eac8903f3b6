// What is computed again, one row at a time, where the tiles cannot give it: the logits of a row, and the rows of results
// that infinite or NaN elements of closed keys have reached. Tiles multiply closed keys by probabilities of 0, and
// 0 * NaN is NaN; whoever finds a row that isn't finite asks here, so that finite calls pay nothing. A row that an open
// key makes infinite or NaN stays as it is. Compiled per target; used by forward.matrix.cpp, decode.matrix.cpp,
// backward_rows.h, decode_backward.matrix.cpp.
#pragma once

#include <cmath>

#include "executors/cpu/attention/pack.h"
#include "executors/cpu/attention/scores.h"
#include "ops/sdpa_call.h"

namespace fulmen::cpu::FULMEN_TARGET {

inline bool all_finite(const float* row, int64_t count) {
  bool finite = true;
  for (int64_t c = 0; c < count; ++c) finite &= std::abs(row[c]) <= std::numeric_limits<float>::max();
  return finite;
}

// One query row of a head against the keys of its open range, element by element.
class LoneRow {
 public:
  LoneRow(const AttentionArguments& a, const AttentionRun& run, const AttentionSegment& segment, int64_t head, int64_t local)
      : a_(a), run_(run), segment_(segment), head_(head), local_(local) {
    const KeyRange open = open_keys(a, segment, local);
    begin_ = open.begin;
    count_ = std::max<int64_t>(open.end - open.begin, 0);
    keys_ = source(sdpa_key, a.key, head / a.group, segment.key_begin + begin_);
    values_ = source(sdpa_value, a.value, head / a.group, segment.key_begin + begin_);
    query_ = widened(source(sdpa_query, a.query, head, segment.query_begin + local), 0, a.head_dim);
  }
  int64_t count() const { return count_; }

  // The logits of the open range, -inf where a mask closes a key; `tanh_row`, if given, gets soft-cap's tanh.
  std::vector<float> logits(std::vector<float>* tanh_row = nullptr) const {
    std::vector<float> s(static_cast<size_t>(round_up(count_, lanes)) + lanes);
    if (tanh_row) tanh_row->assign(s.size(), 0.0f);
    for (int64_t j = 0; j < count_; ++j) s[static_cast<size_t>(j)] = static_cast<float>(dot(query_, key(j)) * a_.scale);
    RowPlace place;
    place.begin = 0;
    place.end = place.live = count_;
    place.distance = local_ + segment_.shift - begin_;
    if (a_.has_slopes) place.slope = static_cast<const float*>(run_.inputs[sdpa_alibi_slopes])[head_ * a_.slopes_stride];
    if (a_.mask.present) place.mask = mask_row(a_, run_.inputs[sdpa_mask], segment_.batch, head_, segment_.query_begin + local_, segment_.key_begin + begin_);
    if (count_ > 0) finish_scores(score_rules(a_, true), place, s.data(), tanh_row ? tanh_row->data() : nullptr);
    return s;
  }

  // Whether an element that isn't finite belongs to this row: of its query, or of a key that is open to it.
  bool is_tainted() const {
    if (!all_finite(query_.data(), a_.head_dim)) return true;
    MaskRow mask;
    if (a_.mask.present && a_.mask.dtype == DType::boolean)
      mask = mask_row(a_, run_.inputs[sdpa_mask], segment_.batch, head_, segment_.query_begin + local_, segment_.key_begin + begin_);
    for (int64_t j = 0; j < count_; ++j) {
      if (mask.data && !mask.data[j * mask.stride]) continue;
      if (!all_finite(key(j).data(), a_.head_dim) || !all_finite(value(j).data(), a_.value_dim)) return true;
    }
    return false;
  }

  std::vector<float> key(int64_t j) const { return widened(keys_, j, a_.head_dim); }
  std::vector<float> value(int64_t j) const { return widened(values_, j, a_.value_dim); }
  std::vector<float> out_grad() const {
    return widened(source(sdpa_out_grad, a_.out_grad, head_, segment_.query_begin + local_), 0, a_.value_dim);
  }
  // What dropout makes of the probabilities: their factors; empty without dropout.
  std::vector<float> dropout(const DropoutRules& rules) const {
    std::vector<float> room;
    if (!rules.active || count_ == 0) return room;
    room.resize(static_cast<size_t>(count_) + 256);
    const float* factors = dropout_factors(rules, attention_dropout_row(segment_.batch * a_.heads + head_, segment_.query_begin + local_),
                                           segment_.key_begin + begin_, count_, room.data());
    return {factors, factors + count_};
  }

  static double dot(const std::vector<float>& x, const std::vector<float>& y) {
    double sum = 0.0;
    for (size_t c = 0; c < x.size(); ++c) sum += static_cast<double>(x[c]) * y[c];
    return sum;
  }

 private:
  Source source(SdpaOperand operand, const AttentionView& view, int64_t head, int64_t row) const {
    return Source(run_.inputs[operand], view, segment_.batch, head, row);
  }
  static std::vector<float> widened(const Source& from, int64_t row, int64_t dims) {
    std::vector<float> wide(static_cast<size_t>(dims));
    if (dims > 0) widen_row(from.row(row), from.dtype, from.col_stride, dims, dims, 1.0f, wide.data());
    return wide;
  }

  const AttentionArguments& a_;
  const AttentionRun& run_;
  const AttentionSegment& segment_;
  int64_t head_, local_, begin_ = 0, count_ = 0;
  Source keys_, values_;
  std::vector<float> query_;
};

// A row of out that isn't finite, once more without what closed keys hold. `out` holds value_dim numbers.
inline void clean_out_row(const AttentionArguments& a, const AttentionRun& run, const AttentionSegment& segment, int64_t head,
                          int64_t local, const DropoutRules& dropout, float* out) {
  const LoneRow row(a, run, segment, head, local);
  if (row.is_tainted()) return;
  const std::vector<float> s = row.logits(), keep = row.dropout(dropout);
  float highest = a.has_sink ? static_cast<const float*>(run.inputs[sdpa_sink])[head * a.sink_stride] : minus_infinity;
  for (int64_t j = 0; j < row.count(); ++j) highest = std::max(highest, s[static_cast<size_t>(j)]);
  if (!std::isfinite(highest)) return;
  double total = a.has_sink ? std::exp(static_cast<double>(static_cast<const float*>(run.inputs[sdpa_sink])[head * a.sink_stride]) - highest) : 0.0;
  std::vector<double> sums(static_cast<size_t>(a.value_dim), 0.0);
  for (int64_t j = 0; j < row.count(); ++j) {
    const double p = std::exp(static_cast<double>(s[static_cast<size_t>(j)]) - highest);
    if (p == 0.0) continue;
    total += p;
    const double weight = keep.empty() ? p : p * keep[static_cast<size_t>(j)];
    const std::vector<float> value = row.value(j);
    for (size_t c = 0; c < sums.size(); ++c) sums[c] += weight * value[c];
  }
  for (size_t c = 0; c < sums.size(); ++c) out[c] = static_cast<float>(sums[c] / total);
}

// The same for a row of the query's gradient, with p = exp2((s - shift) log2(e) - log), delta as the tiles have it.
inline void clean_query_grad_row(const AttentionArguments& a, const AttentionRun& run, const AttentionSegment& segment, int64_t head,
                                 int64_t local, const DropoutRules& dropout, float shift, float log, float delta, float* grad) {
  const LoneRow row(a, run, segment, head, local);
  const std::vector<float> out_grad = row.out_grad();
  if (row.is_tainted() || !std::isfinite(delta) || !all_finite(out_grad.data(), a.value_dim)) return;
  std::vector<float> tanh_row;
  const std::vector<float> s = row.logits(a.softcap > 0 ? &tanh_row : nullptr), keep = row.dropout(dropout);
  std::vector<double> sums(static_cast<size_t>(a.head_dim), 0.0);
  for (int64_t j = 0; j < row.count(); ++j) {
    const auto at = static_cast<size_t>(j);
    const double p = std::exp2((static_cast<double>(s[at]) - shift) * static_cast<double>(log2_e) - log);
    if (p == 0.0) continue;
    double ds = p * (LoneRow::dot(out_grad, row.value(j)) * (keep.empty() ? 1.0 : keep[at]) - delta);
    if (!tanh_row.empty()) ds *= 1.0 - static_cast<double>(tanh_row[at]) * tanh_row[at];
    const std::vector<float> key = row.key(j);
    for (size_t c = 0; c < sums.size(); ++c) sums[c] += ds * key[c];
  }
  for (size_t c = 0; c < sums.size(); ++c) grad[c] = static_cast<float>(sums[c] * a.scale);
}

}  // namespace fulmen::cpu::FULMEN_TARGET
