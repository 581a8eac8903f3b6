// Products with at most max_few_rows rows (a decoding step, a matrix times a vector): B is read once, where it lies, so
// the speed is that of memory. Two forms: B's rows contiguous (columns summed in a strip that stays in cache), and B's
// columns contiguous (dot products).
#include "executors/cpu/gemm/finish_tile.h"
#include "executors/cpu/gemm/pack_cells.h"

namespace fulmen::cpu::FULMEN_TARGET {
namespace {

template <class T, int Rows>
void sum_along_rows(const FewRowsArgs& args, const SingleCells<T>& b, int64_t column0, int64_t columns) {
  constexpr int steps = 4;
  const int64_t strip = few_rows_strip;
  std::memset(args.scratch, 0, sizeof(float) * static_cast<size_t>(Rows * strip));
  for (int64_t c = 0; c < args.k; c += steps) {
    const int live = static_cast<int>(args.k - c < steps ? args.k - c : steps);
    vfloat a[Rows][steps];
    for (int r = 0; r < Rows; ++r)
      for (int s = 0; s < steps; ++s) a[r][s] = s < live ? splat(args.a[r * args.a_row_stride + c + s]) : vfloat{};
    for (int64_t j = 0; j < columns; j += lanes) {
      vfloat row[steps];
      for (int s = 0; s < steps; ++s)
        row[s] = s < live ? std::bit_cast<vfloat>(b.along_width(column0 + j, c + s, columns - j)) : vfloat{};
      for (int r = 0; r < Rows; ++r) {
        float* const p = args.scratch + r * strip + j;
        vfloat sum = load(p);
        for (int s = 0; s < steps; ++s) sum = fma(a[r][s], row[s], sum);
        store(p, sum);
      }
    }
  }
}

template <class T, int Rows, int Columns>
void dot_columns(const FewRowsArgs& args, const SingleCells<T>& b, int64_t column, float* out) {
  vfloat sums[Rows][Columns] = {};
  for (int64_t c = 0; c < args.k; c += lanes) {
    vfloat a[Rows];
    for (int r = 0; r < Rows; ++r) {
      const float* p = args.a + r * args.a_row_stride + c;
      a[r] = args.k - c >= lanes ? load(p) : load_partial(p, static_cast<int>(args.k - c));
    }
    for (int j = 0; j < Columns; ++j) {
      const vfloat v = std::bit_cast<vfloat>(b.along_k(column + j, c));
      for (int r = 0; r < Rows; ++r) sums[r][j] = fma(a[r], v, sums[r][j]);
    }
  }
  for (int r = 0; r < Rows; ++r)
    for (int j = 0; j < Columns; ++j) out[r * few_rows_strip + j] = reduce_add(sums[r][j]);
}

template <class T, int Rows>
void multiply_rows(const FewRowsArgs& args, const SingleCells<T>& b) {
  for (int64_t column0 = 0; column0 < args.columns; column0 += few_rows_strip) {
    const int64_t columns = args.columns - column0 < few_rows_strip ? args.columns - column0 : few_rows_strip;
    if (b.width_stride == 1) {
      sum_along_rows<T, Rows>(args, b, column0, columns);
    } else {
      int64_t j = 0;
      for (; j + 4 <= columns; j += 4) dot_columns<T, Rows, 4>(args, b, column0 + j, args.scratch + j);
      for (; j < columns; ++j) dot_columns<T, Rows, 1>(args, b, column0 + j, args.scratch + j);
    }
    finish_tile(args.scratch, few_rows_strip, Rows, static_cast<int>(columns), 0, column0, *args.output);
  }
}

// The rounding is dropped where the dtype holds the rounded values anyway.
template <class T>
SingleCells<T> cells_of(const PackSource& s, int64_t k) {
  return {static_cast<const T*>(s.data), s.width_stride, s.k_stride, k, s.round == s.dtype ? DType::f32 : s.round};
}

template <class T>
void choose_rows(const FewRowsArgs& args) {
  const auto b = cells_of<T>(args.b, args.k);
  switch (args.rows) {
    case 1: return multiply_rows<T, 1>(args, b);
    case 2: return multiply_rows<T, 2>(args, b);
    case 3: return multiply_rows<T, 3>(args, b);
    default: return multiply_rows<T, 4>(args, b);
  }
}

template <class T>
void convert_rows(const SingleCells<T>& cells, int64_t rows, int64_t k, float* out) {
  for (int64_t r = 0; r < rows; ++r) {
    float* const row = out + r * k;
    int64_t c = 0;
    if (cells.k_stride == 1)
      for (; c + lanes <= k; c += lanes) store(row + c, std::bit_cast<vfloat>(cells.along_k(r, c)));
    for (; c < k; ++c) row[c] = std::bit_cast<float>(cells.one(r, c));
  }
}

}  // namespace

void multiply_few_rows(const FewRowsArgs& args) {
  switch (args.b.dtype) {
    case DType::bf16: return choose_rows<bf16>(args);
    case DType::f16: return choose_rows<f16>(args);
    default: return choose_rows<float>(args);
  }
}

void rows_to_float(const PackSource& source, int64_t rows, int64_t k, float* out) {
  switch (source.dtype) {
    case DType::bf16: return convert_rows(cells_of<bf16>(source, k), rows, k, out);
    case DType::f16: return convert_rows(cells_of<f16>(source, k), rows, k, out);
    default: return convert_rows(cells_of<float>(source, k), rows, k, out);
  }
}

}  // namespace fulmen::cpu::FULMEN_TARGET
