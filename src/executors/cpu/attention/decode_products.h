// Products of a few rows with keys or values that are read where they lie, once: what the kernels for few queries are
// made of (decode.matrix.cpp, decode_backward.matrix.cpp). Compiled per target.
#pragma once

#include "executors/cpu/attention/pack.h"

namespace fulmen::cpu::FULMEN_TARGET {

// Rows (queries of all heads of a key head) that these kernels take; rows that go together; keys of a block.
inline constexpr int64_t decode_most_rows = 8, decode_together = 4, decode_block_keys = 128;

// Keys of a chunk, by the shape alone: results may depend on it, not on the threads.
inline int64_t decode_chunk_keys(const AttentionArguments& a) {
  constexpr int64_t wanted_chunks = 32;
  const int64_t units = std::max<int64_t>(a.batch * a.key_heads, 1), wanted = (wanted_chunks + units - 1) / units;
  return std::max<int64_t>(512, round_up((a.key_len + wanted - 1) / wanted, decode_block_keys));
}

template <class T>
FULMEN_INLINE vfloat load_tail(const T* p, int64_t count) {
  return count >= lanes ? load(p) : load_partial(p, static_cast<int>(count));
}

// How far ahead rows are fetched: hardware prefetchers stop at the end of a page.
inline constexpr int64_t rows_ahead = 16;
template <class T>
FULMEN_INLINE void fetch_row(const T* row, int64_t dims) {
  for (int64_t c = 0; c < dims; c += 64 / static_cast<int64_t>(sizeof(T))) __builtin_prefetch(row + c);
}

// The sum of each of `lanes` vectors, as one vector.
FULMEN_INLINE vfloat sums_of(vfloat (&vectors)[lanes]) {
  vuint square[lanes];
#pragma GCC unroll 16
  for (int i = 0; i < lanes; ++i) square[i] = std::bit_cast<vuint>(vectors[i]);
  transpose_square(square);
  vfloat total[2] = {};
#pragma GCC unroll 16
  for (int i = 0; i < lanes; ++i) total[i % 2] += std::bit_cast<vfloat>(square[i]);
  return total[0] + total[1];
}

// Scores of `rows` query rows against keys; query rows are padded with zeros to whole vectors.
template <int rows, class T>
void dot_keys(const T* keys, int64_t key_row, int64_t count, int64_t dims, const float* query, int64_t query_row, float* score, int64_t score_row) {
  const int64_t whole = round_down(dims, lanes);
  for (int64_t first = 0; first < count; first += lanes) {
    vfloat parts[rows][lanes];
    for (int i = 0; i < lanes; ++i) {
      vfloat sum[rows] = {};
      if (first + i < count) {
        const T* key = keys + (first + i) * key_row;
        fetch_row(key + rows_ahead * key_row, dims);
        for (int64_t c = 0; c < whole; c += lanes) {
          const vfloat k = load(key + c);
#pragma GCC unroll 4
          for (int r = 0; r < rows; ++r) sum[r] = fma(load(query + r * query_row + c), k, sum[r]);
        }
        if (whole < dims) {
          const vfloat k = load_partial(key + whole, static_cast<int>(dims - whole));
#pragma GCC unroll 4
          for (int r = 0; r < rows; ++r) sum[r] = fma(load(query + r * query_row + whole), k, sum[r]);
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < rows; ++r) parts[r][i] = sum[r];
    }
    for (int r = 0; r < rows; ++r) store(score + r * score_row + first, sums_of(parts[r]));
  }
}

// out += p V over a block of keys, four vectors of dims at a time.
template <int rows, class T>
void add_values(const T* values, int64_t value_row, int64_t count, int64_t dims, const float* p, int64_t p_row, float* out, int64_t out_row) {
  for (int64_t c = 0; c < dims; c += 4 * lanes) {
    vfloat sum[rows][4];
    for (int r = 0; r < rows; ++r)
      for (int v = 0; v < 4; ++v) sum[r][v] = load(out + r * out_row + c + v * lanes);
    const bool whole = dims - c >= 4 * lanes;
    for (int64_t j = 0; j < count; ++j) {
      const T* value = values + j * value_row + c;
      fetch_row(value + rows_ahead * value_row, std::min<int64_t>(dims - c, 4 * lanes));
      vfloat x[4];
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v)
        x[v] = whole ? load(value + v * lanes) : dims - c > v * lanes ? load_tail(value + v * lanes, dims - c - v * lanes) : vfloat{};
#pragma GCC unroll 4
      for (int r = 0; r < rows; ++r) {
        const vfloat weight = splat(p[r * p_row + j]);
#pragma GCC unroll 4
        for (int v = 0; v < 4; ++v) sum[r][v] = fma(weight, x[v], sum[r][v]);
      }
    }
    for (int r = 0; r < rows; ++r)
      for (int v = 0; v < 4; ++v) store(out + r * out_row + c + v * lanes, sum[r][v]);
  }
}

// target[j] = sum over rows of weights[r][j] * rows[r], for keys j; `rows` are padded to whole vectors. Elements are
// written once, in whole rows.
template <int rows, class T>
void write_key_sums(const float* weights, int64_t weight_row, int64_t count, int64_t dims, const float* source, int64_t source_row, T* target,
                    int64_t target_row) {
  for (int64_t j = 0; j < count; ++j) {
    vfloat weight[rows];
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) weight[r] = splat(weights[r * weight_row + j]);
    T* to = target + j * target_row;
    for (int64_t c = 0; c < dims; c += lanes) {
      vfloat sum = weight[0] * load(source + c);
#pragma GCC unroll 8
      for (int r = 1; r < rows; ++r) sum = fma(weight[r], load(source + r * source_row + c), sum);
      if (dims - c >= lanes) store(to + c, sum);
      else store_partial(to + c, sum, static_cast<int>(dims - c));
    }
  }
}

}  // namespace fulmen::cpu::FULMEN_TARGET
