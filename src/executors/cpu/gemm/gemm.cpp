// Runs a GemmPlan: splits C into blocks, packs what they need, and hands packed panels to the kernels. Blocks are taken
// from a counter, so a thread that is slowed down by others takes fewer.
#include "executors/cpu/gemm/gemm.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>
#include <optional>
#include <utility>

#include "core/error.h"
#include "core/parallel.h"
#include "executors/cpu/gemm/gemm_plan.h"
#include "executors/cpu/gemm/thread_scratch.h"
#include "executors/cpu/shares.h"

namespace fulmen::cpu {
namespace {

using State = GemmPlan::State;

// Below this many multiply-adds (bytes of B, where it is read once) a second thread costs more than it brings.
constexpr double work_per_thread = 5e5;
constexpr double bytes_per_thread = 128 << 10;
constexpr int64_t least_split_rows = 96;
constexpr int64_t own_b_bytes = 64 << 10;  // panels of B that a task packs at a time

struct Operands {
  const void* a;
  const void* b;
  const void* packed_b;  // all panels of B, or null
  void* c;
  const void* bias;
  const void* residual;
};

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t round_up(int64_t a, int64_t step) { return ceil_div(a, step) * step; }

const void* advance(const void* p, DType dtype, int64_t elements) {
  return p ? static_cast<const char*>(p) + elements * static_cast<int64_t>(dtype_bytes(dtype)) : nullptr;
}
void* advance(void* p, DType dtype, int64_t elements) {
  return static_cast<char*>(p) + elements * static_cast<int64_t>(dtype_bytes(dtype));
}

// Element offset of a layout's matrix number `index`.
int64_t batch_offset(const State& s, const MatrixLayout& layout, int64_t index) {
  int64_t offset = 0;
  for (int d = s.batch_dims - 1; d >= 0; --d) {
    const size_t i = static_cast<size_t>(d);
    offset += index % s.batch_sizes[i] * layout.batch_strides[i];
    index /= s.batch_sizes[i];
  }
  return offset;
}

Operands matrix_of_batch(const State& s, const Operands& all, int64_t index) {
  if (s.batch_count == 1) return all;
  Operands one = all;
  one.a = advance(all.a, s.a.dtype, batch_offset(s, s.a, index));
  one.b = advance(all.b, s.b.dtype, batch_offset(s, s.b, index));
  one.c = advance(all.c, s.c.dtype, batch_offset(s, s.c, index));
  one.residual = advance(all.residual, s.residual.dtype, batch_offset(s, s.residual, index));
  return one;
}

// C from (row, column) on, as a matrix of its own.
TileOutput output_at(const State& s, const Operands& matrix, int64_t row, int64_t column) {
  TileOutput out{};
  out.c = advance(matrix.c, s.c.dtype, row * s.c.row_stride + column * s.c.column_stride);
  out.c_dtype = s.c.dtype;
  out.c_row_stride = s.c.row_stride, out.c_column_stride = s.c.column_stride;
  if (s.has_bias)
    out.bias = advance(matrix.bias, s.bias_dtype, row * s.bias_row_stride + column * s.bias_column_stride);
  out.bias_dtype = s.bias_dtype;
  out.bias_row_stride = s.bias_row_stride, out.bias_column_stride = s.bias_column_stride;
  if (s.has_residual)
    out.residual = advance(matrix.residual, s.residual.dtype,
                           row * s.residual.row_stride + column * s.residual.column_stride);
  out.residual_dtype = s.residual.dtype;
  out.residual_row_stride = s.residual.row_stride, out.residual_column_stride = s.residual.column_stride;
  out.alpha = s.alpha, out.residual_scale = s.residual_scale;
  out.activation = s.activation;
  out.accumulate = s.accumulate;
  out.first_part = out.last_part = true;
  return out;
}

// A's rows from `row` and B's columns from `column` on, from element `k0` along the sum.
PackSource rows_of_a(const State& s, const Operands& matrix, int64_t row, int64_t k0) {
  return {advance(matrix.a, s.a.dtype, row * s.a.row_stride + k0 * s.a.column_stride), s.a.dtype, s.compute,
          s.a.row_stride, s.a.column_stride};
}
PackSource columns_of_b(const State& s, const Operands& matrix, int64_t column, int64_t k0) {
  return {advance(matrix.b, s.b.dtype, column * s.b.column_stride + k0 * s.b.row_stride), s.b.dtype, s.compute,
          s.b.column_stride, s.b.row_stride};
}

// How a run is cut: blocks of `rows` x `columns` of C.
struct Blocks {
  int64_t rows, columns;
  int64_t down, across;
  int64_t count() const { return down * across; }
};

// Few big blocks would leave threads idle at the end; small ones read B, or pack A, more often.
Blocks cut_blocks(const State& s, int64_t columns, int64_t most_columns, int64_t matrices, int threads, int64_t least_rows_wanted, int64_t least_columns_wanted) {
  const int64_t mr = s.kernels->mr, nr = s.kernels->nr;
  Blocks cut{std::min(s.block_rows, round_up(s.m, mr)), std::min(most_columns, round_up(columns, nr)), 0, 0};
  const int64_t wanted = threads > 1 ? 8 * threads : 1;
  const int64_t least_rows = round_up(least_rows_wanted, mr), least_columns = round_up(least_columns_wanted, nr);
  const auto count = [&] { return ceil_div(s.m, cut.rows) * ceil_div(columns, cut.columns) * matrices; };
  while (count() < wanted) {
    if (cut.rows / 2 >= least_rows)
      cut.rows = round_up(cut.rows / 2, mr);
    else if (cut.columns / 2 >= least_columns)
      cut.columns = round_up(cut.columns / 2, nr);
    else
      break;
  }
  cut.rows = round_up(ceil_div(s.m, ceil_div(s.m, cut.rows)), mr);  // no small block at the end
  cut.down = ceil_div(s.m, cut.rows);
  cut.across = ceil_div(columns, cut.columns);
  return cut;
}

// Scratch of one thread: a packed block of A, panels of B, sums, and the parts of long sums.
struct BlockScratch {
  char* a;
  char* b;
  float* sums;
  float* partial;
  // Which rows of A are packed: those of a whole sum can be used again.
  const void* packed_rows = nullptr;
  int64_t packed_row_count = 0;

  BlockScratch(const State& s, const Blocks& cut, bool prepacked) {
    const BlockKernels& kernels = *s.kernels;
    const int64_t part = longest_part(s, prepacked);
    const int64_t rows = round_up(cut.rows, kernels.mr);
    const size_t a_bytes = static_cast<size_t>(rows * part * kernels.element_bytes + 64);
    const int64_t b_columns = s.mode == GemmMode::own_b ? own_columns(s, cut) : prepacked ? 0 : s.own_columns;
    const size_t b_bytes = static_cast<size_t>(b_columns * part * kernels.element_bytes);
    const size_t sum_bytes = static_cast<size_t>(rows * kernels.nr) * sizeof(float);
    const size_t partial_bytes = s.k > part ? static_cast<size_t>(rows * cut.columns) * sizeof(float) : 0;
    const auto aligned = [](size_t bytes) { return (bytes + 127) / 64 * 64; };
    a = thread_scratch(aligned(a_bytes) + aligned(b_bytes) + aligned(sum_bytes) + aligned(partial_bytes));
    b = a + aligned(a_bytes);
    sums = reinterpret_cast<float*>(b + aligned(b_bytes));
    partial = reinterpret_cast<float*>(b + aligned(b_bytes) + aligned(sum_bytes));
  }

  // Elements of the sum that are multiplied at a time.
  static int64_t longest_part(const State& s, bool prepacked) {
    return s.mode == GemmMode::together && !prepacked ? s.chunk_k : round_up(std::min(s.k_part, std::max<int64_t>(s.k, 1)), s.kernels->k_step);
  }

  // Columns of B packed at a time when a task packs its own.
  static int64_t own_columns(const State& s, const Blocks& cut) {
    const int64_t nr = s.kernels->nr;
    const int64_t part = round_up(std::max<int64_t>(s.k_part, 1), s.kernels->k_step);
    const int64_t panels = std::max<int64_t>(1, own_b_bytes / (nr * part * s.kernels->element_bytes));
    return std::min(panels * nr, cut.columns);
  }
};

// The block's A from element k0 of the sum on: shared panels, rows as they lie, or packed here.
void give_a(const State& s, const Operands& matrix, int64_t row, int64_t rows, int64_t k0, int64_t k, const char* shared_a, BlockScratch& scratch, MultiplyArgs& args) {
  const PackSource a = rows_of_a(s, matrix, row, k0);
  if (s.reads_rows) {
    args.a = a.data, args.a_row_stride = s.a.row_stride;
  } else if (shared_a) {
    args.a = shared_a;
  } else {
    if (scratch.packed_rows != a.data || scratch.packed_row_count != rows) {
      s.kernels->pack_a(a, rows, k, scratch.a);
      scratch.packed_rows = a.data;
      scratch.packed_row_count = rows;
    }
    args.a = scratch.a;
  }
}

// Rows [row, row + rows) and columns [column, column + columns) of one matrix, the whole of the sum. `packed_b` holds
// panels of all of B from this column on; null: packed here.
void compute_block(const State& s, const Operands& matrix, const Blocks& cut, int64_t row, int64_t rows, int64_t column, int64_t columns, const char* packed_b,
                   BlockScratch& scratch) {
  const BlockKernels& kernels = *s.kernels;
  TileOutput out = output_at(s, matrix, row, column);
  const bool in_parts = s.k > s.k_part;
  if (in_parts) {
    out.partial = scratch.partial;
    out.partial_row_stride = cut.columns;
  }
  int64_t k0 = 0;
  do {
    const int64_t k = std::min(s.k - k0, s.k_part);
    const int64_t k_padded = round_up(k, kernels.k_step);
    out.first_part = k0 == 0;
    out.last_part = k0 + k == s.k;
    MultiplyArgs args{};
    if (in_parts) scratch.packed_rows = nullptr;
    give_a(s, matrix, row, rows, k0, k, nullptr, scratch, args);
    args.rows = rows;
    args.k = k_padded;
    args.scratch = scratch.sums;
    args.output = &out;
    if (packed_b) {
      args.b = packed_b + kernels.nr * k0 * kernels.element_bytes;
      args.b_panel_bytes = s.b_panel_bytes;
      args.columns = columns;
      kernels.multiply(args);
    } else {
      args.b = scratch.b;
      args.b_panel_bytes = kernels.nr * k_padded * kernels.element_bytes;
      const int64_t step = BlockScratch::own_columns(s, cut);
      for (int64_t j = 0; j < columns; j += step) {
        args.columns = std::min(step, columns - j);
        args.column0 = j;
        kernels.pack_b(columns_of_b(s, matrix, column + j, k0), args.columns, k, scratch.b);
        kernels.multiply(args);
      }
    }
    k0 += k;
  } while (k0 < s.k);
}

int threads_for(double units, double units_per_thread) {
  const int available = thread_count();
  const double useful = units / units_per_thread;
  return useful < 2 ? 1 : useful < available ? static_cast<int>(useful) : available;
}

void run_few_rows(const State& s, const Operands& all) {
  const bool direct = s.a.dtype == DType::f32 && s.compute == DType::f32 && s.a.column_stride == 1;
  const int threads = threads_for(static_cast<double>(s.n * std::max<int64_t>(s.k, 1) * s.batch_count) * static_cast<double>(dtype_bytes(s.b.dtype)), bytes_per_thread);
  const int64_t strip = std::clamp<int64_t>(round_up(ceil_div(s.n * s.batch_count, 4 * threads), 64), 64, few_rows_strip);
  const int64_t across = ceil_div(s.n, strip);
  std::atomic<int64_t> next{0};
  parallel_region(threads, [&](int, int) {
    const size_t sums_bytes = static_cast<size_t>(few_rows_scratch) * sizeof(float);
    const size_t a_bytes = direct ? 0 : static_cast<size_t>(s.m * s.k) * sizeof(float);
    char* const memory = thread_scratch(sums_bytes + a_bytes);
    float* const converted = reinterpret_cast<float*>(memory + sums_bytes);
    int64_t converted_matrix = -1;
    for (int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < across * s.batch_count;) {
      const int64_t index = task / across, column = task % across * strip;
      const Operands matrix = matrix_of_batch(s, all, index);
      const PackSource a = rows_of_a(s, matrix, 0, 0);
      if (!direct && converted_matrix != index) {
        s.rows_to_float(a, s.m, s.k, converted);
        converted_matrix = index;
      }
      const TileOutput out = output_at(s, matrix, 0, column);
      s.few_rows({direct ? static_cast<const float*>(a.data) : converted, direct ? s.a.row_stride : s.k, s.m, s.k,
                  columns_of_b(s, matrix, column, 0), std::min(strip, s.n - column), reinterpret_cast<float*>(memory), &out});
    }
  });
}

// Tasks of all matrices of the batch; B's panels are packed by each task, or were packed before.
void run_own_b(const State& s, const Operands& all) {
  const int threads = threads_for(s.work, work_per_thread);
  const Blocks cut = cut_blocks(s, s.n, round_up(s.n, s.kernels->nr), s.batch_count, threads, 96, 128);
  std::atomic<int64_t> next{0};
  parallel_region(threads, [&](int, int) {
    BlockScratch scratch(s, cut, true);
    for (int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < cut.count() * s.batch_count;) {
      const Operands matrix = matrix_of_batch(s, all, task / cut.count());
      const int64_t block = task % cut.count();
      const int64_t row = block / cut.across * cut.rows, column = block % cut.across * cut.columns;
      const char* const packed = matrix.packed_b ? static_cast<const char*>(matrix.packed_b) + column / s.kernels->nr * s.b_panel_bytes : nullptr;
      compute_block(s, matrix, cut, row, std::min(cut.rows, s.m - row), column, std::min(cut.columns, s.n - column), packed, scratch);
    }
  });
}

// One round of a run of threads together: a chunk of columns, a chunk of the sum, one matrix of the batch.
struct Round {
  int64_t column0, columns, k0, k;
  int64_t k_padded;
  int64_t a_panel_bytes, b_panel_bytes;
  bool first, last;  // of the sum
};

// Panels [begin, end) of A. Packing may write a little past a panel, which may be another thread's: the last one goes
// through this thread's own memory.
void pack_panels_of_a(const State& s, const Operands& matrix, const Round& round, int64_t begin, int64_t end, char* packed, char* own) {
  if (begin >= end) return;
  const int64_t mr = s.kernels->mr, last = end - 1;
  if (begin < last)
    s.kernels->pack_a(rows_of_a(s, matrix, begin * mr, round.k0), (last - begin) * mr, round.k, packed + begin * round.a_panel_bytes);
  s.kernels->pack_a(rows_of_a(s, matrix, last * mr, round.k0), std::min(mr, s.m - last * mr), round.k, own);
  std::memcpy(packed + last * round.a_panel_bytes, own, static_cast<size_t>(round.a_panel_bytes));
}

// What the workspace of a run of threads together holds, one after the other.
struct SharedMemory {
  int64_t b_bytes, a_bytes, sum_bytes;
  explicit SharedMemory(const State& s) {
    const BlockKernels& kernels = *s.kernels;
    const auto aligned = [](int64_t bytes) { return round_up(bytes, 64); };
    b_bytes = s.own_columns ? 0 : aligned(s.chunk_columns * s.chunk_k * kernels.element_bytes);
    // 64 bytes more: the last panel but one of A may be written a little past.
    a_bytes = s.shares_a ? aligned(round_up(s.m, kernels.mr) * s.chunk_k * kernels.element_bytes + 64) : 0;
    sum_bytes = s.chunk_k < s.k && !s.sums_in_c ? aligned(s.m * s.n * static_cast<int64_t>(sizeof(float))) : 0;
  }
};

// Where the block goes: to C, or to the sums so far. Of the chunks of a sum that C holds itself the first takes what is
// added to C, the last the bias.
TileOutput output_of_round(const State& s, const Operands& matrix, const Round& round, int64_t row, int64_t column, float* sums) {
  TileOutput out = output_at(s, matrix, row, column);
  if (round.first && round.last) return out;
  if (s.sums_in_c) {
    if (!round.last) out.bias = nullptr;
    if (!round.first) out.residual = nullptr, out.accumulate = true;
  } else {
    out.partial = sums + row * s.n + column;
    out.partial_row_stride = s.n;
    out.first_part = round.first, out.last_part = round.last;
  }
  return out;
}

// The tasks of a round whose B is shared: blocks of C, those of the same columns one after the other.
void compute_shared(const State& s, const Operands& matrix, const Round& round, const Blocks& cut, const char* shared_a, const char* shared_b, float* sums,
                    Shares& shares, int thread, int total, BlockScratch& scratch) {
  const int64_t mr = s.kernels->mr, nr = s.kernels->nr;
  const int64_t across = ceil_div(round.columns, cut.columns);
  shares.take_all(cut.down, across, thread, total, [&](int64_t first, int64_t count, int64_t item) {
    const int64_t row = (first + item % count) * cut.rows, column = item / count * cut.columns;
    const int64_t rows = std::min(cut.rows, s.m - row);
    const TileOutput out = output_of_round(s, matrix, round, row, round.column0 + column, sums);
    MultiplyArgs args{};
    give_a(s, matrix, row, rows, round.k0, round.k, s.shares_a ? shared_a + row / mr * round.a_panel_bytes : nullptr, scratch, args);
    args.b = shared_b + column / nr * round.b_panel_bytes;
    args.b_panel_bytes = round.b_panel_bytes;
    args.rows = rows;
    args.columns = std::min(cut.columns, round.columns - column);
    args.k = round.k_padded;
    args.scratch = scratch.sums;
    args.output = &out;
    s.kernels->multiply(args);
  });
}

// The tasks of a round in which each task packs some columns of B for all rows.
void compute_own_columns(const State& s, const Operands& matrix, const Round& round, const Blocks& cut, const char* shared_a, float* sums,
                         std::atomic<int64_t>& next, BlockScratch& scratch) {
  for (int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < ceil_div(s.n, s.own_columns);) {
    const int64_t column = task * s.own_columns, columns = std::min(s.own_columns, s.n - column);
    s.kernels->pack_b(columns_of_b(s, matrix, column, round.k0), columns, round.k, scratch.b);
    for (int64_t row = 0; row < s.m; row += cut.rows) {
      const int64_t rows = std::min(cut.rows, s.m - row);
      const TileOutput out = output_of_round(s, matrix, round, row, column, sums);
      MultiplyArgs args{};
      give_a(s, matrix, row, rows, round.k0, round.k, s.shares_a ? shared_a + row / s.kernels->mr * round.a_panel_bytes : nullptr, scratch, args);
      args.b = scratch.b;
      args.b_panel_bytes = round.b_panel_bytes;
      args.rows = rows;
      args.columns = columns;
      args.k = round.k_padded;
      args.scratch = scratch.sums;
      args.output = &out;
      s.kernels->multiply(args);
    }
  }
}

// Rounds, one a chunk of columns and of a long sum: the threads pack what they share, then take tasks.
void run_together(const State& s, const Operands& all, void* workspace) {
  const int threads = threads_for(s.work / static_cast<double>(s.batch_count), work_per_thread);
  const BlockKernels& kernels = *s.kernels;
  const int64_t nr = kernels.nr, mr = kernels.mr;
  const Blocks cut = s.own_columns ? Blocks{std::min(s.block_rows, round_up(s.m, mr)), s.own_columns, 0, 0}
                                   : cut_blocks(s, std::min(s.chunk_columns, s.n), s.block_columns, 1, threads, s.shares_a || s.reads_rows ? 24 : 48, 64);
  const int64_t column_chunks = ceil_div(s.n, s.chunk_columns), k_chunks = std::max<int64_t>(1, ceil_div(s.k, s.chunk_k));
  const int64_t rounds = column_chunks * k_chunks * s.batch_count;
  const bool shares = !s.own_columns || s.shares_a;
  const SharedMemory memory(s);
  char* const shared_b = static_cast<char*>(workspace);
  char* const shared_a = shared_b + memory.b_bytes;
  float* const sums = reinterpret_cast<float*>(shared_a + memory.a_bytes);
  std::atomic<int64_t> next{0};
  Shares shares_of_rows(threads);
  std::atomic<bool> failed{false};
  SpinBarrier barrier;
  parallel_region(threads, [&](int thread, int total) {
    std::optional<BlockScratch> scratch;
    try {
      scratch.emplace(s, cut, false);
    } catch (const std::bad_alloc&) {  // the others must not wait for this thread for ever
      failed.store(true);
    }
    if (shares || rounds > 1) barrier.wait(total);
    if (failed.load()) return;
    // A's panels serve all chunks of columns, C's sums stay near from one chunk of k to the next: k goes round slower.
    for (int64_t index = 0; index < rounds; ++index) {
      const Operands matrix = matrix_of_batch(s, all, index / (column_chunks * k_chunks));
      const int64_t column_chunk = index % column_chunks, k_chunk = index / column_chunks % k_chunks;
      Round round{};
      round.column0 = column_chunk * s.chunk_columns;
      round.columns = std::min(s.chunk_columns, s.n - round.column0);
      round.k0 = k_chunk * s.chunk_k;
      round.k = std::min(s.chunk_k, s.k - round.k0);
      round.k_padded = round_up(round.k, kernels.k_step);
      round.a_panel_bytes = mr * round.k_padded * kernels.element_bytes;
      round.b_panel_bytes = nr * round.k_padded * kernels.element_bytes;
      round.first = k_chunk == 0, round.last = k_chunk + 1 == k_chunks;
      if (!s.own_columns) {
        const int64_t panels = ceil_div(round.columns, nr);
        const int64_t begin = panels * thread / total, end = panels * (thread + 1) / total;
        if (begin < end)
          kernels.pack_b(columns_of_b(s, matrix, round.column0 + begin * nr, round.k0), std::min(end * nr, round.columns) - begin * nr, round.k,
                         shared_b + begin * round.b_panel_bytes);
      }
      if (s.shares_a && column_chunk == 0) {
        const int64_t row_panels = ceil_div(s.m, mr);
        pack_panels_of_a(s, matrix, round, row_panels * thread / total, row_panels * (thread + 1) / total, shared_a, scratch->a);
      }
      if (shares) barrier.wait(total);
      scratch->packed_rows = nullptr;
      if (s.own_columns)
        compute_own_columns(s, matrix, round, cut, shared_a, sums, next, *scratch);
      else
        compute_shared(s, matrix, round, cut, shared_a, shared_b, sums, shares_of_rows, thread, total, *scratch);
      if (index + 1 == rounds) return;
      barrier.wait(total);
      if (thread == 0) next.store(0, std::memory_order_relaxed), shares_of_rows.reset(total);
      if (!shares) barrier.wait(total);  // otherwise one stands before the next tasks
    }
  });
  if (failed.load()) throw std::bad_alloc();
}

// Adds the parts of rows [begin, end), which follow one another part by part, in their order.
void add_parts(const State& s, const float* parts, int64_t count, int64_t begin, int64_t end, float* c) {
  const int64_t size = s.m * s.n;
  for (int64_t row = begin; row < end; ++row) {
    float* const to = c + row * s.c.row_stride;
    const float* from = parts + row * s.n;
    std::copy_n(from, s.n, to);
    for (int64_t part = 1; part < count; ++part) {
      from += size;
      for (int64_t j = 0; j < s.n; ++j) to[j] += from[j];
    }
  }
}

// Tasks, one a part of the sum and block of rows: each packs what it needs of both operands.
void run_split_sum(const State& s, const Operands& all, void* workspace) {
  const int threads = threads_for(s.work, work_per_thread);
  const BlockKernels& kernels = *s.kernels;
  const int64_t parts = ceil_div(s.k, s.sum_part), wanted = threads > 1 ? ceil_div(2 * threads, parts) : 1;
  const int64_t rows_of_task = round_up(ceil_div(s.m, std::clamp<int64_t>(wanted, 1, ceil_div(s.m, least_split_rows))), kernels.mr);
  const int64_t down = ceil_div(s.m, rows_of_task);
  float* const sums = static_cast<float*>(workspace);
  std::atomic<int64_t> next{0};
  std::atomic<bool> failed{false};
  SpinBarrier barrier;
  parallel_region(threads, [&](int thread, int total) {
    const int64_t chunk_bytes = round_up(split_chunk, kernels.k_step) * kernels.element_bytes;
    const int64_t a_bytes = round_up(rows_of_task * chunk_bytes + 64, 64), b_bytes = round_up(s.n, kernels.nr) * chunk_bytes;
    char* memory = nullptr;
    try {
      memory = thread_scratch(static_cast<size_t>(a_bytes + b_bytes + round_up(rows_of_task, kernels.mr) * kernels.nr * static_cast<int64_t>(sizeof(float))));
    } catch (const std::bad_alloc&) {
      failed.store(true);
    }
    for (int64_t task; memory && (task = next.fetch_add(1, std::memory_order_relaxed)) < parts * down;) {
      const int64_t part = task / down, row = task % down * rows_of_task, rows = std::min(rows_of_task, s.m - row);
      const int64_t begin = part * s.sum_part, end = std::min(begin + s.sum_part, s.k);
      TileOutput out{};
      out.c = sums + (part * s.m + row) * s.n;
      out.c_dtype = DType::f32;
      out.c_row_stride = s.n, out.c_column_stride = 1;
      out.alpha = 1.0f;
      out.first_part = out.last_part = true;
      for (int64_t k0 = begin; k0 < end; k0 += split_chunk) {
        const int64_t k = std::min(split_chunk, end - k0);
        MultiplyArgs args{};
        args.k = round_up(k, kernels.k_step);
        kernels.pack_b(columns_of_b(s, all, 0, k0), s.n, k, memory + a_bytes);
        kernels.pack_a(rows_of_a(s, all, row, k0), rows, k, memory);
        args.a = memory;
        args.b = memory + a_bytes;
        args.b_panel_bytes = kernels.nr * args.k * kernels.element_bytes;
        args.rows = rows, args.columns = s.n;
        args.scratch = reinterpret_cast<float*>(memory + a_bytes + b_bytes);
        args.output = &out;
        kernels.multiply(args);
        out.accumulate = true;
      }
    }
    barrier.wait(total);
    if (!failed.load()) add_parts(s, sums, parts, s.m * thread / total, s.m * (thread + 1) / total, static_cast<float*>(all.c));
  });
  if (failed.load()) throw std::bad_alloc();
}

void run_state(const State& s, const Operands& given, void* workspace) {
  Operands all = given;
  if (s.swapped) std::swap(all.a, all.b);
  switch (s.mode) {
    case GemmMode::nothing: return;
    case GemmMode::few_rows: return run_few_rows(s, all);
    case GemmMode::own_b: return run_own_b(s, all);
    case GemmMode::split_sum: return run_split_sum(s, all, workspace);
    case GemmMode::together: return all.packed_b ? run_own_b(s, all) : run_together(s, all, workspace);
  }
}

}  // namespace

bool gemm_takes(DType dtype) { return dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f16; }

GemmPlan::GemmPlan(const GemmProblem& problem) : state_(std::make_unique<State>(decide_gemm(problem))) {}
GemmPlan::~GemmPlan() = default;
GemmPlan::GemmPlan(GemmPlan&&) noexcept = default;
GemmPlan& GemmPlan::operator=(GemmPlan&&) noexcept = default;

size_t GemmPlan::workspace_bytes() const {
  const State& s = *state_;
  if (s.mode == GemmMode::split_sum) return static_cast<size_t>(ceil_div(s.k, s.sum_part) * s.m * s.n) * sizeof(float);
  if (s.mode != GemmMode::together) return 0;
  const SharedMemory memory(s);
  return static_cast<size_t>(memory.b_bytes + memory.a_bytes + memory.sum_bytes);
}

void GemmPlan::run(const void* a, const void* b, void* c, const void* bias, const void* residual, void* workspace) const {
  run_state(*state_, {a, b, nullptr, c, bias, residual}, workspace);
}

bool GemmPlan::can_prepack_b() const {
  const State& s = *state_;
  if (s.swapped || (s.mode != GemmMode::own_b && s.mode != GemmMode::together)) return false;
  for (int d = 0; d < s.batch_dims; ++d)
    if (s.b.batch_strides[static_cast<size_t>(d)] != 0) return false;
  return true;
}

size_t GemmPlan::packed_b_bytes() const {
  const State& s = *state_;
  return can_prepack_b() ? static_cast<size_t>(ceil_div(s.n, s.kernels->nr) * s.b_panel_bytes) : 0;
}

void GemmPlan::pack_b(const void* b, void* packed) const {
  const State& s = *state_;
  FULMEN_CHECK(can_prepack_b());
  s.kernels->pack_b(columns_of_b(s, {nullptr, b, nullptr, nullptr, nullptr, nullptr}, 0, 0), s.n, s.k, packed);
}

void GemmPlan::run_packed(const void* a, const void* packed_b, void* c, const void* bias, const void* residual,
                          void* workspace) const {
  FULMEN_CHECK(can_prepack_b());
  run_state(*state_, {a, nullptr, packed_b, c, bias, residual}, workspace);
}

size_t gemm_workspace_bytes(const GemmProblem& problem) { return GemmPlan(problem).workspace_bytes(); }

void gemm(const GemmProblem& problem, const void* a, const void* b, void* c, const void* bias, const void* residual,
          void* workspace) {
  GemmPlan(problem).run(a, b, c, bias, residual, workspace);
}

}  // namespace fulmen::cpu
