// A plain float64 attention for the tests of the CPU kernels: the formulas of ops/sdpa_call.h, element by element, with
// tensors that know their strides and watch the bytes around and between their elements.
#pragma once

#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "core/half.h"
#include "core/philox.h"
#include "ops/sdpa_call.h"

namespace fulmen::attention_test {

// A strided tensor inside a buffer of canary bytes.
struct Tensor {
  TensorType type;
  std::vector<unsigned char> bytes;
  int64_t origin = 0;  // element offset of index 0

  static constexpr unsigned char canary = 0xA5;

  Tensor() = default;
  Tensor(DType dtype, Dims shape, Dims strides, int64_t pad = 8) {
    type = contiguous_type(dtype, shape);
    type.strides = strides;
    origin = pad;
    bytes.assign(static_cast<size_t>(span_elements(shape, strides) + 2 * pad) * dtype_bytes(dtype), canary);
  }
  Tensor(DType dtype, Dims shape) : Tensor(dtype, shape, contiguous_strides(shape)) {}

  int64_t at(std::initializer_list<int64_t> index) const {
    int64_t offset = origin;
    size_t d = 0;
    for (int64_t i : index) offset += i * type.strides[d++];
    return offset;
  }
  double get(std::initializer_list<int64_t> index) const { return get_at(at(index)); }
  double get_at(int64_t offset) const {
    const unsigned char* p = bytes.data() + offset * static_cast<int64_t>(dtype_bytes(type.dtype));
    switch (type.dtype) {
      case DType::boolean: return *p;
      case DType::i32: { int32_t v; std::memcpy(&v, p, 4); return v; }
      case DType::i64: { int64_t v; std::memcpy(&v, p, 8); return static_cast<double>(v); }
      case DType::f16: { f16 v; std::memcpy(&v, p, 2); return static_cast<float>(v); }
      case DType::bf16: { bf16 v; std::memcpy(&v, p, 2); return static_cast<float>(v); }
      default: { float v; std::memcpy(&v, p, 4); return v; }
    }
  }
  void set_at(int64_t offset, double value) {
    unsigned char* p = bytes.data() + offset * static_cast<int64_t>(dtype_bytes(type.dtype));
    const float narrow = static_cast<float>(value);
    switch (type.dtype) {
      case DType::boolean: *p = value != 0; break;
      case DType::i32: { const auto v = static_cast<int32_t>(value); std::memcpy(p, &v, 4); break; }
      case DType::i64: { const auto v = static_cast<int64_t>(value); std::memcpy(p, &v, 8); break; }
      case DType::f16: { const f16 v(narrow); std::memcpy(p, &v, 2); break; }
      case DType::bf16: { const bf16 v(narrow); std::memcpy(p, &v, 2); break; }
      default: std::memcpy(p, &narrow, 4);
    }
  }
  template <class F>
  void for_each(F&& body) const {  // body(offset)
    if (element_count(type.shape) == 0) return;
    std::vector<int64_t> index(type.shape.size(), 0);
    for (;;) {
      int64_t offset = origin;
      for (size_t d = 0; d < index.size(); ++d) offset += index[d] * type.strides[d];
      body(offset);
      size_t d = index.size();
      while (d > 0) {
        if (++index[d - 1] < type.shape[d - 1]) break;
        index[--d] = 0;
      }
      if (d == 0) return;
    }
  }
  // Canary bytes between and around the elements that are no longer canaries.
  int64_t broken_canaries() const {
    const size_t width = dtype_bytes(type.dtype);
    std::vector<bool> owned(bytes.size(), false);
    for_each([&](int64_t offset) {
      for (size_t b = 0; b < width; ++b) owned[static_cast<size_t>(offset) * width + b] = true;
    });
    int64_t broken = 0;
    for (size_t i = 0; i < bytes.size(); ++i) broken += !owned[i] && bytes[i] != canary;
    return broken;
  }
  void* data() { return bytes.data() + origin * static_cast<int64_t>(dtype_bytes(type.dtype)); }
  const void* data() const { return bytes.data() + origin * static_cast<int64_t>(dtype_bytes(type.dtype)); }
};

struct Operands {
  SdpaCall call;
  Tensor query, key, value, mask, sink, slopes, query_offsets, key_offsets, key_lengths, seed, out_grad;
};

struct Reference {
  std::vector<double> out, lse, query, key, value, mask, sink, slopes;
};

// Everything in row-major order of each tensor's shape.
inline Reference reference_attention(const Operands& o) {
  const SdpaCall& c = o.call;
  const int64_t batch = c.batch(), heads = c.heads(), key_heads = c.key_heads(), q = c.query_len(), k = c.key_len(), d = c.head_dim(), dv = c.value_dim();
  Reference r;
  r.out.assign(static_cast<size_t>(batch * heads * q * dv), 0.0);
  r.lse.assign(static_cast<size_t>(batch * heads * q), -std::numeric_limits<double>::infinity());
  r.query.assign(static_cast<size_t>(batch * heads * q * d), 0.0);
  r.key.assign(static_cast<size_t>(batch * key_heads * k * d), 0.0);
  r.value.assign(static_cast<size_t>(batch * key_heads * k * dv), 0.0);
  if (c.mask) r.mask.assign(static_cast<size_t>(element_count(c.mask->shape)), 0.0);
  r.sink.assign(static_cast<size_t>(heads), 0.0);
  r.slopes.assign(static_cast<size_t>(heads), 0.0);
  const int64_t group = key_heads ? heads / key_heads : 1;
  const auto sequence_of = [](const Tensor& offsets, int64_t position) {
    for (int64_t s = 0; s + 1 < offsets.type.shape[0]; ++s)
      if (position >= offsets.get({s}) && position < offsets.get({s + 1})) return s;
    return int64_t{-1};
  };
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t i = 0; i < q; ++i) {
        const int64_t kh = h / group;
        std::vector<double> s(static_cast<size_t>(k)), tanh_s(static_cast<size_t>(k)), distance(static_cast<size_t>(k)), keep(static_cast<size_t>(k), 1.0);
        std::vector<int64_t> mask_index(static_cast<size_t>(k), 0);
        double highest = -std::numeric_limits<double>::infinity();
        for (int64_t j = 0; j < k; ++j) {
          const auto at = static_cast<size_t>(j);
          int64_t li = i, lj = j, shift = c.lower_right ? k - q : 0;
          bool open = true;
          if (c.query_offsets) {
            const int64_t sq = sequence_of(o.query_offsets, i), sk = sequence_of(o.key_offsets, j);
            open = sq >= 0 && sq == sk;
            if (open) {
              li = i - static_cast<int64_t>(o.query_offsets.get({sq}));
              lj = j - static_cast<int64_t>(o.key_offsets.get({sk}));
              if (c.lower_right)
                shift = static_cast<int64_t>(o.key_offsets.get({sk + 1}) - o.key_offsets.get({sk}) - o.query_offsets.get({sq + 1}) + o.query_offsets.get({sq}));
            }
          }
          const int64_t diagonal = lj - li - shift;
          if (c.is_causal && diagonal > 0) open = false;
          if (c.window_left >= 0 && diagonal < -c.window_left) open = false;
          if (c.window_right >= 0 && diagonal > c.window_right) open = false;
          if (c.key_lengths && j >= o.key_lengths.get({b})) open = false;
          double dot = 0;
          for (int64_t x = 0; x < d; ++x) dot += o.query.get({b, h, i, x}) * o.key.get({b, kh, j, x});
          double logit = dot * c.scale;
          if (c.softcap > 0) {
            tanh_s[at] = std::tanh(logit / c.softcap);
            logit = c.softcap * tanh_s[at];
          }
          distance[at] = std::abs(static_cast<double>(diagonal));
          if (c.alibi_slopes) logit -= o.slopes.get({h}) * distance[at];
          if (c.mask) {
            const Dims& m = c.mask->shape;
            const int64_t mb = m[0] == 1 ? 0 : b, mh = m[1] == 1 ? 0 : h, mi = m[2] == 1 ? 0 : i, mj = m[3] == 1 ? 0 : j;
            mask_index[at] = ((mb * m[1] + mh) * m[2] + mi) * m[3] + mj;
            const double value = o.mask.get({mb, mh, mi, mj});
            if (c.mask->dtype == DType::boolean) open = open && value != 0;
            else logit += value;
          }
          s[at] = open ? logit : -std::numeric_limits<double>::infinity();
          highest = std::max(highest, s[at]);
          if (c.dropout_p > 0)
            keep[at] = dropout_keeps(philox_word(static_cast<uint64_t>(o.seed.get({0})), static_cast<uint64_t>(o.seed.get({1})),
                                                 attention_dropout_row(b * heads + h, i), static_cast<uint64_t>(j)),
                                     dropout_threshold(c.dropout_p)) ? 1.0 / (1.0 - c.dropout_p) : 0.0;
        }
        if (highest == -std::numeric_limits<double>::infinity()) continue;
        double top = highest;
        if (c.sink) top = std::max(top, o.sink.get({h}));
        double sum = c.sink ? std::exp(o.sink.get({h}) - top) : 0.0;
        for (int64_t j = 0; j < k; ++j) sum += std::exp(s[static_cast<size_t>(j)] - top);
        const double lse = top + std::log(sum);
        const auto row = static_cast<size_t>((b * heads + h) * q + i);
        r.lse[row] = lse;
        std::vector<double> p(static_cast<size_t>(k)), dp(static_cast<size_t>(k), 0.0);
        double delta = 0;
        for (int64_t x = 0; x < dv; ++x) {
          double out = 0;
          for (int64_t j = 0; j < k; ++j) {
            const auto at = static_cast<size_t>(j);
            p[at] = std::exp(s[at] - top) / sum;
            if (p[at] != 0) out += p[at] * keep[at] * o.value.get({b, kh, j, x});
          }
          r.out[row * static_cast<size_t>(dv) + static_cast<size_t>(x)] = out;
          delta += out * o.out_grad.get({b, h, i, x});
        }
        if (dv == 0)
          for (int64_t j = 0; j < k; ++j) p[static_cast<size_t>(j)] = std::exp(s[static_cast<size_t>(j)] - top) / sum;
        for (int64_t j = 0; j < k; ++j) {
          const auto at = static_cast<size_t>(j);
          if (p[at] == 0) continue;
          for (int64_t x = 0; x < dv; ++x) {
            dp[at] += o.out_grad.get({b, h, i, x}) * o.value.get({b, kh, j, x});
            r.value[static_cast<size_t>(((b * key_heads + kh) * k + j) * dv + x)] += p[at] * keep[at] * o.out_grad.get({b, h, i, x});
          }
          double ds = p[at] * (keep[at] * dp[at] - delta);
          if (c.mask) r.mask[static_cast<size_t>(mask_index[at])] += ds;
          r.slopes[static_cast<size_t>(h)] -= ds * distance[at];
          if (c.softcap > 0) ds *= 1 - tanh_s[at] * tanh_s[at];
          ds *= c.scale;
          for (int64_t x = 0; x < d; ++x) {
            r.query[row * static_cast<size_t>(d) + static_cast<size_t>(x)] += ds * o.key.get({b, kh, j, x});
            r.key[static_cast<size_t>(((b * key_heads + kh) * k + j) * d + x)] += ds * o.query.get({b, h, i, x});
          }
        }
        if (c.sink) r.sink[static_cast<size_t>(h)] -= std::exp(o.sink.get({h}) - lse) * delta;
      }
  return r;
}

}  // namespace fulmen::attention_test
