// The definition of attention in float64, row by row, with a bound on what rounding may do to each element.
//
// A logit s may be off by eps = c u32 (sum |q||k| |scale| + |slope distance| + |mask| + softcap): probabilities then lie
// between exp(s - eps - lse_high) and exp(s + eps - lse_low). Products of 16-bit kernels round p and the gradient of the
// scores to their dtype; delta = sum out_grad out is taken over the rounded out. Everything behind is sums of terms,
// whose bounds add. Of style 8: a row to which a key with NaN or infinite elements is open may be anything; the others
// must not notice.
#include <algorithm>
#include <cmath>
#include <limits>

#include "core/philox.h"
#include "ops/builder.h"
#include "ops/reference_loops.h"
#include "tests/fuzz/attention_call.h"

namespace fulmen::fuzz {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

// An operand seen with all leading dims: element (batch, head, row, column) is at lead(batch, head) + row * row_step + column * column_step.
struct Wide {
  const HostTensor* host = nullptr;
  Dims lead_strides;  // batch dims, then heads; 0 where broadcast
  int64_t row_step = 0, column_step = 0;

  Wide() = default;
  Wide(const HostTensor& tensor, size_t lead) : host(&tensor) {
    const Dims& shape = tensor.type.shape;
    const Dims own = contiguous_strides(shape);
    const size_t rank = shape.size(), pad = lead + 2 - rank;
    lead_strides.assign(lead, 0);
    for (size_t d = 0; d + 2 < rank; ++d)
      if (shape[d] != 1) lead_strides[pad + d] = own[d];
    row_step = shape[rank - 2] == 1 ? 0 : own[rank - 2];
    column_step = shape[rank - 1] == 1 ? 0 : own[rank - 1];
  }
  int64_t at(const Dims& batch, int64_t head) const {
    int64_t offset = head * lead_strides.back();
    for (size_t d = 0; d < batch.size(); ++d) offset += batch[d] * lead_strides[d];
    return offset;
  }
};

double unit_of(DType dtype) {
  switch (dtype) {
    case DType::bf16: return 0x1p-9;
    case DType::f16: return 0x1p-12;
    case DType::f64: return 0x1p-53;
    default: return 0x1p-24;
  }
}

// What a result of this dtype cannot resolve near zero.
double floor_of(DType dtype) { return dtype == DType::f16 ? 0x1p-24 : dtype == DType::f64 ? 1e-300 : 1e-36; }

bool all_finite(const double* numbers, int64_t count) { return std::all_of(numbers, numbers + count, [](double x) { return std::isfinite(x); }); }

Bounded zeros(const Dims& shape) {
  const auto count = static_cast<size_t>(element_count(shape));
  return {std::vector<double>(count, 0.0), std::vector<double>(count, 0.0)};
}

void round_result(Bounded& result, DType dtype) {
  for (size_t k = 0; k < result.value.size(); ++k)
    result.bound[k] += 2 * unit_of(dtype) * (std::abs(result.value[k]) + result.bound[k]) + floor_of(dtype);
}

}  // namespace

ExactAttention exact_attention(const AttentionCall& call, const AttentionValues& values) {
  const auto flag = [&](const char* name) { return call.attrs.has(name) && call.attrs.get_bool(name); };
  const auto integer = [&](const char* name) { return call.attrs.has(name) ? call.attrs.get_int(name) : int64_t{-1}; };
  const auto number = [&](const char* name, double fallback) { return call.attrs.has(name) ? call.attrs.get_float(name) : fallback; };
  const auto& operands = values.operands;
  const auto rank = [&](size_t i) { return call.types[i]->shape.size(); };
  const size_t lead = std::max({rank(0), rank(1), rank(2), size_t{3}}) - 2;
  const Wide query(operands[0], lead), key(operands[1], lead), value(operands[2], lead);
  const auto lead_size = [&](size_t operand, size_t dim) {
    const Dims& shape = call.types[operand]->shape;
    const size_t pad = lead + 2 - shape.size();
    return dim < pad ? int64_t{1} : shape[dim - pad];
  };
  const auto broadcast = [](int64_t a, int64_t b) { return a == 1 ? b : a; };
  Dims batch_dims;
  for (size_t d = 0; d + 1 < lead; ++d) batch_dims.push_back(broadcast(broadcast(lead_size(0, d), lead_size(1, d)), lead_size(2, d)));
  const int64_t query_heads = lead_size(0, lead - 1), key_heads = broadcast(lead_size(1, lead - 1), lead_size(2, lead - 1));
  const int64_t heads = query_heads == 1 && key_heads != 1 ? key_heads : query_heads, group = key_heads > 0 ? std::max<int64_t>(heads / key_heads, 1) : 1;
  const int64_t queries = call.query().shape[call.query().shape.size() - 2], keys = call.key().shape[call.key().shape.size() - 2];
  const int64_t dims = call.query().shape.back(), value_dims = call.value().shape.back();
  const int64_t batch_count = element_count(batch_dims);

  const DType dtype = call.query().dtype;
  const double unit = unit_of(dtype), arithmetic = 16 * (dtype == DType::f64 ? 0x1p-53 : 0x1p-24), half = is_half(dtype) ? 2 * unit : 0.0;
  const double scale = number("scale", 1.0 / std::sqrt(static_cast<double>(std::max<int64_t>(dims, 1))));
  const double softcap = number("softcap", 0.0), dropout_p = number("dropout_p", 0.0);
  const int64_t left = integer("window_left"), right = integer("window_right");
  const bool causal = flag("is_causal"), lower_right = flag("lower_right");
  const bool has_mask = call.types[sdpa_mask].has_value(), bool_mask = has_mask && call.types[sdpa_mask]->dtype == DType::boolean;
  const Wide mask = has_mask ? Wide(operands[sdpa_mask], lead) : Wide();
  const bool packed = call.types[sdpa_query_offsets].has_value();

  ExactAttention exact;
  const auto n = static_cast<size_t>(keys), width = static_cast<size_t>(value_dims);
  exact.out = zeros({batch_count, heads, queries, value_dims});
  exact.lse = zeros({batch_count, heads, queries});
  for (size_t i = 0; i < sdpa_gradient_count; ++i)
    if (call.types[i] && call.types[i]->requires_grad) exact.gradients[i] = zeros(call.types[i]->shape);
  const auto wants = [&](size_t i) { return !exact.gradients[i].value.empty(); };
  // The gradient of an operand that is broadcast is a sum of parts that were rounded each.
  double parts_off[sdpa_gradient_count] = {};
  for (size_t i = 0; i < 3; ++i) {
    int64_t own = 1;
    for (size_t d = 0; d + 1 < lead; ++d) own *= lead_size(i, d);
    if (own != batch_count || lead_size(i, lead - 1) != (i == 0 ? heads : key_heads)) parts_off[i] = 2 * unit;
  }
  const auto add = [&](size_t i, int64_t at, double term, double bound) {
    exact.gradients[i].value[static_cast<size_t>(at)] += term;
    exact.gradients[i].bound[static_cast<size_t>(at)] += bound + parts_off[i] * std::abs(term);
  };
  const auto sequence_of = [&](const HostTensor& offsets, int64_t position) {
    for (size_t s = 0; s + 1 < offsets.i.size(); ++s)
      if (position >= offsets.i[s] && position < offsets.i[s + 1]) return static_cast<int64_t>(s);
    return int64_t{-1};
  };
  std::vector<double> s(n), off(n), tanh_s(n), distance(n), keep(n), p(n), p_off(n);
  std::vector<int64_t> mask_at(n);
  bool any_tainted = false;
  for (int64_t b = 0; b < batch_count; ++b) {
    Dims batch(batch_dims.size());
    for (size_t d = batch.size(), rest = static_cast<size_t>(b); d-- > 0;) {
      batch[d] = static_cast<int64_t>(rest % static_cast<size_t>(batch_dims[d]));
      rest /= static_cast<size_t>(batch_dims[d]);
    }
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t key_head = h / group;
      const int64_t query_base = query.at(batch, h), key_base = key.at(batch, key_head), value_base = value.at(batch, key_head);
      const int64_t mask_base = has_mask ? mask.at(batch, h) : 0;
      const double slope = call.types[sdpa_alibi_slopes] ? operands[sdpa_alibi_slopes].f[static_cast<size_t>(h)] : 0.0;
      const double sink = call.types[sdpa_sink] ? operands[sdpa_sink].f[static_cast<size_t>(h)] : -infinity;
      for (int64_t i = 0; i < queries; ++i) {
        const size_t row = static_cast<size_t>((b * heads + h) * queries + i);
        const double* q = query.host->f.data() + query_base + i * query.row_step;
        double top = -infinity;
        bool tainted = false;  // an open key that isn't finite
        for (int64_t j = 0; j < keys; ++j) {
          const auto at = static_cast<size_t>(j);
          int64_t local_i = i, local_j = j, shift = lower_right ? keys - queries : 0;
          bool open = true;
          if (packed) {
            const auto &query_offsets = operands[sdpa_query_offsets], &key_offsets = operands[sdpa_key_offsets];
            const int64_t sequence = sequence_of(query_offsets, i);
            open = sequence >= 0 && sequence == sequence_of(key_offsets, j);
            if (open) {
              const auto first = static_cast<size_t>(sequence);
              local_i = i - query_offsets.i[first];
              local_j = j - key_offsets.i[first];
              if (lower_right) shift = key_offsets.i[first + 1] - key_offsets.i[first] - query_offsets.i[first + 1] + query_offsets.i[first];
            }
          }
          const int64_t diagonal = local_j - local_i - shift;
          open = open && !(causal && diagonal > 0) && !(left >= 0 && diagonal < -left) && !(right >= 0 && !causal && diagonal > right);
          if (call.types[sdpa_key_lengths]) open = open && j < operands[sdpa_key_lengths].i[static_cast<size_t>(b)];
          mask_at[at] = mask_base + i * mask.row_step + j * mask.column_step;
          if (bool_mask) open = open && operands[sdpa_mask].i[static_cast<size_t>(mask_at[at])] != 0;
          s[at] = -infinity;
          off[at] = 0;
          if (!open) continue;
          const double* k = key.host->f.data() + key_base + j * key.row_step;
          const double* v = value.host->f.data() + value_base + j * value.row_step;
          if (call.style == 8 && !(all_finite(k, dims) && all_finite(v, value_dims))) {
            tainted = true;
            break;
          }
          double dot = 0, size = 0;
          for (int64_t x = 0; x < dims; ++x) {
            dot += q[x] * k[x];
            size += std::abs(q[x] * k[x]);
          }
          double logit = dot * scale;
          size *= std::abs(scale);
          if (softcap > 0) {
            tanh_s[at] = std::tanh(logit / softcap);
            logit = softcap * tanh_s[at];
            size += softcap;
          }
          distance[at] = std::abs(static_cast<double>(diagonal));
          logit -= slope * distance[at];
          size += std::abs(slope * distance[at]);
          if (has_mask && !bool_mask) {
            const double added = operands[sdpa_mask].f[static_cast<size_t>(mask_at[at])];
            logit += added;
            if (std::isfinite(added)) size += std::abs(added);
          }
          s[at] = logit;
          off[at] = arithmetic * size;
          top = std::max(top, logit);
          keep[at] = 1.0;
          if (dropout_p > 0) {
            const auto& seed = operands[sdpa_seed].i;
            const uint32_t word = philox_word(static_cast<uint64_t>(seed[0]), static_cast<uint64_t>(seed[1]), attention_dropout_row(b * heads + h, i), static_cast<uint64_t>(j));
            keep[at] = dropout_keeps(word, dropout_threshold(dropout_p)) ? 1.0 / (1.0 - dropout_p) : 0.0;
          }
        }
        if (tainted) {
          any_tainted = true;
          exact.lse.bound[row] = infinity;
          std::fill_n(exact.out.bound.begin() + static_cast<std::ptrdiff_t>(row * width), width, infinity);
          for (int64_t x = 0; x < dims; ++x)
            if (wants(sdpa_query)) add(sdpa_query, query_base + i * query.row_step + x, 0, infinity);
          continue;
        }
        if (top == -infinity) {
          exact.lse.value[row] = -infinity;
          continue;
        }
        // The log-sum-exp and the two it may be taken for.
        const auto log_sum = [&](double sign) {
          double highest = sink;
          for (size_t j = 0; j < n; ++j) highest = std::max(highest, s[j] + sign * off[j]);
          double sum = std::exp(sink - highest);
          for (size_t j = 0; j < n; ++j) sum += std::exp(s[j] + sign * off[j] - highest);
          return highest + std::log(sum);
        };
        const double lse = log_sum(0), slack = arithmetic * (1 + std::abs(lse)), high = log_sum(1) + slack, low = log_sum(-1) - slack;
        exact.lse.value[row] = lse;
        exact.lse.bound[row] = std::max(high - lse, lse - low) + 4 * half * unit;
        for (size_t j = 0; j < n; ++j) {
          p[j] = std::exp(s[j] - lse);
          const double most = std::min(1.0, std::exp(s[j] + off[j] - low)), least = std::exp(s[j] - off[j] - high);
          p_off[j] = s[j] == -infinity ? 0.0 : std::max({most - p[j], p[j] - least, 0.0}) + (half + arithmetic) * p[j] + 1e-37;
        }
        double delta = 0, delta_off = 0;
        const double* out_grad = values.out_grad.f.data() + row * width;
        for (size_t x = 0; x < width; ++x) {
          double out = 0, bound = 0;
          for (size_t j = 0; j < n; ++j) {
            if (s[j] == -infinity) continue;
            const double term = keep[j] * value.host->f[static_cast<size_t>(value_base) + j * static_cast<size_t>(value.row_step) + x];
            out += p[j] * term;
            bound += (p_off[j] + arithmetic * p[j]) * std::abs(term);
          }
          bound += 2 * unit * (std::abs(out) + bound);
          exact.out.value[row * width + x] = out;
          exact.out.bound[row * width + x] = bound + floor_of(dtype);
          delta += out * out_grad[x];
          delta_off += (bound + floor_of(dtype) + arithmetic * std::abs(out)) * std::abs(out_grad[x]);
        }
        const double lse_grad = values.lse_grad.f.empty() ? 0.0 : values.lse_grad.f[row];
        if (wants(sdpa_sink)) {
          const double share = std::exp(sink - lse), share_off = std::max(std::min(1.0, std::exp(sink - low)) - share, share - std::exp(sink - high)) + arithmetic * share;
          add(sdpa_sink, h, share * (lse_grad - delta), share_off * std::abs(lse_grad - delta) + share * (delta_off + arithmetic * std::abs(lse_grad)));
        }
        for (size_t j = 0; j < n; ++j) {
          if (s[j] == -infinity) continue;
          double dp = 0, dp_size = 0;
          const int64_t value_row = value_base + static_cast<int64_t>(j) * value.row_step;
          for (size_t x = 0; x < width; ++x) {
            const double term = out_grad[x] * value.host->f[static_cast<size_t>(value_row) + x];
            dp += term;
            dp_size += std::abs(term);
            if (wants(sdpa_value))
              add(sdpa_value, value_row + static_cast<int64_t>(x), p[j] * keep[j] * out_grad[x], (p_off[j] + arithmetic * p[j]) * keep[j] * std::abs(out_grad[x]));
          }
          double ds = p[j] * (keep[j] * dp - delta + lse_grad);
          double ds_off = p_off[j] * (keep[j] * std::abs(dp) + std::abs(delta) + std::abs(lse_grad)) +
                          (p[j] + p_off[j]) * (arithmetic * (keep[j] * dp_size + std::abs(lse_grad)) + delta_off);
          if (wants(sdpa_mask)) add(sdpa_mask, mask_at[j], ds, ds_off + arithmetic * std::abs(ds));
          if (wants(sdpa_alibi_slopes)) add(sdpa_alibi_slopes, h, -ds * distance[j], (ds_off + arithmetic * std::abs(ds)) * distance[j]);
          if (softcap > 0) {
            const double chain = 1 - tanh_s[j] * tanh_s[j];
            ds_off = ds_off * (chain + arithmetic) + std::abs(ds) * (arithmetic + 2 * chain * off[j] / softcap);
            ds *= chain;
          }
          ds_off += (half + arithmetic) * std::abs(ds) + half * ds_off;
          const int64_t key_row = key_base + static_cast<int64_t>(j) * key.row_step, query_row = query_base + i * query.row_step;
          for (int64_t x = 0; x < dims; ++x) {
            const double k = scale * key.host->f[static_cast<size_t>(key_row + x)], qx = scale * q[x];
            if (wants(sdpa_query)) add(sdpa_query, query_row + x, ds * k, ds_off * std::abs(k));
            if (wants(sdpa_key)) add(sdpa_key, key_row + x, ds * qx, ds_off * std::abs(qx));
          }
        }
      }
    }
  }
  for (size_t i = 0; i < sdpa_gradient_count; ++i) {
    if (!wants(i)) continue;
    // A row that is NaN makes sums over rows so.
    if (any_tainted && i != sdpa_query) std::fill(exact.gradients[i].bound.begin(), exact.gradients[i].bound.end(), infinity);
    if (parts_off[i] > 0)
      for (double& bound : exact.gradients[i].bound) bound += floor_of(dtype) * static_cast<double>(batch_count * heads);
    round_result(exact.gradients[i], call.types[i]->dtype);
  }
  return exact;
}

}  // namespace fulmen::fuzz
