// Tile instructions on f64 and i64 registers, and the conversions between register domains. Plain loops, compiled once
// for the baseline: these dtypes are rare on hot paths (indices, counters, gradient checks in double precision).
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#include "core/half.h"
#include "executors/cpu/tile/kernels.h"

namespace fulmen::cpu {

// One copy a compilation of kernels.simd.cpp.
namespace generic { const tile::KernelTable& tile_table(); }
#if defined(FULMEN_X86)
namespace avx2 { const tile::KernelTable& tile_table(); }
namespace avx512 { const tile::KernelTable& tile_table(); }
#endif

}  // namespace fulmen::cpu

namespace fulmen::cpu::tile {
namespace {

using pointwise::Kind;

template <class Body, class T>
constexpr int argument_count() {
  if constexpr (requires(T x) { Body::apply(x); }) return 1;
  else if constexpr (requires(T x) { Body::apply(x, x); }) return 2;
  else if constexpr (requires(T x) { Body::apply(x, x, x); }) return 3;
  else return 4;
}

template <class Body, class T, size_t... i>
T apply_body(const T* x, std::index_sequence<i...>) {
  return Body::apply(x[i]...);
}

template <class Body, class T, class Result, int count, int form>
void pointwise_loop(const Work& work) {
  Result* dst = static_cast<Result*>(work.dst);
  const T* src[count];
  for (int i = 0; i < count; ++i) src[i] = static_cast<const T*>(work.src[i]);
  for (int64_t row = 0; row < work.rows; ++row) {
    for (int64_t c = 0; c < work.cols; ++c) {
      T x[count];
      for (int i = 0; i < count; ++i) x[i] = form >> i & 1 ? *src[i] : src[i][c];
      *dst++ = static_cast<Result>(apply_body<Body, T>(x, std::make_index_sequence<count>{}));
    }
    for (int i = 0; i < count; ++i) src[i] += form >> i & 1 ? work.step[i] : work.cols;
  }
}

template <class T, int form>
void where_loop(const Work& work) {
  T* dst = static_cast<T*>(work.dst);
  const float* condition = static_cast<const float*>(work.src[0]);
  const T *yes = static_cast<const T*>(work.src[1]), *no = static_cast<const T*>(work.src[2]);
  for (int64_t row = 0; row < work.rows; ++row) {
    for (int64_t c = 0; c < work.cols; ++c) {
      const bool chosen = condition[form & 1 ? 0 : c] != 0.0f;
      *dst++ = chosen ? yes[form & 2 ? 0 : c] : no[form & 4 ? 0 : c];
    }
    condition += form & 1 ? work.step[0] : work.cols;
    yes += form & 2 ? work.step[1] : work.cols;
    no += form & 4 ? work.step[2] : work.cols;
  }
}

template <class Body, int operands, Kind kind, class T>
void fill_forms(Kernel (&forms)[8]) {
  // Logical ops read "is not 0" first and work on f32; division by an integer 0 is an error, which tiles cannot raise.
  constexpr bool divides = std::is_same_v<Body, pointwise::FloorDivide> || std::is_same_v<Body, pointwise::TruncDivide> || std::is_same_v<Body, pointwise::Remainder> ||
                           std::is_same_v<Body, pointwise::Fmod>;
  if constexpr (kind == Kind::logical || (std::is_same_v<T, int64_t> && (kind == Kind::floating || divides))) {
    return;
  } else if constexpr (kind == Kind::select) {
    forms[0] = where_loop<T, 0>;
    forms[1] = where_loop<T, 1>;
    forms[2] = where_loop<T, 2>;
    forms[3] = where_loop<T, 3>;
    forms[4] = where_loop<T, 4>;
    forms[5] = where_loop<T, 5>;
    forms[6] = where_loop<T, 6>;
  } else {
    using Result = std::conditional_t<kind == Kind::comparison, float, T>;
    constexpr int count = argument_count<Body, T>();
    constexpr int rest = ((1 << count) - 1) & ~((1 << operands) - 1);
    forms[0] = pointwise_loop<Body, T, Result, count, 0 | rest>;
    if constexpr (operands == 2) {
      forms[1] = pointwise_loop<Body, T, Result, count, 1 | rest>;
      forms[2] = pointwise_loop<Body, T, Result, count, 2 | rest>;
    }
  }
}

template <Fold fold, class T>
T combine(T a, T b) {
  if constexpr (fold == Fold::sum) return pointwise::Add::apply(a, b);
  else if constexpr (fold == Fold::max) return pointwise::maximum(a, b);
  else return pointwise::minimum(a, b);
}

template <Fold fold, class T>
void reduce_rows(const Work& work) {
  T* dst = static_cast<T*>(work.dst);
  const T* src = static_cast<const T*>(work.src[0]);
  for (int64_t row = 0; row < work.rows; ++row, src += work.cols) {
    T value = src[0];
    for (int64_t c = 1; c < work.cols; ++c) value = combine<fold>(value, src[c]);
    dst[row] = work.first ? value : combine<fold>(dst[row], value);
  }
}

template <Fold fold, class T>
void reduce_columns(const Work& work) {
  T* dst = static_cast<T*>(work.dst);
  const T* src = static_cast<const T*>(work.src[0]);
  for (int64_t row = 0; row < work.rows; ++row)
    for (int64_t c = 0; c < work.cols; ++c) dst[c] = combine<fold>(dst[c], *src++);
}

template <class T>
void multiply_reduce_rows(const Work& work) {
  T* dst = static_cast<T*>(work.dst);
  const T *a = static_cast<const T*>(work.src[0]), *b = static_cast<const T*>(work.src[1]);
  for (int64_t row = 0; row < work.rows; ++row) {
    T value = 0;
    for (int64_t c = 0; c < work.cols; ++c)
      value = pointwise::Add::apply(value, pointwise::Mul::apply(*a++, *b++));
    dst[row] = work.first ? value : pointwise::Add::apply(dst[row], value);
  }
}

template <class T>
void repeat(const Work& work) {
  for (int64_t row = 0; row < work.rows; ++row)
    std::memcpy(static_cast<T*>(work.dst) + row * work.cols, work.src[0], static_cast<size_t>(work.cols) * sizeof(T));
}

template <class T>
void spread(const Work& work) {
  T* dst = static_cast<T*>(work.dst);
  for (int64_t row = 0; row < work.rows; ++row)
    for (int64_t c = 0; c < work.cols; ++c) *dst++ = static_cast<const T*>(work.src[0])[row * work.step[0]];
}

// bool in memory: any byte but 0 is true.
struct Truth {
  uint8_t byte;
};

template <class To, class From>
To convert(From x) {
  if constexpr (std::is_same_v<From, Truth>) return To(x.byte ? 1 : 0);
  else if constexpr (std::is_same_v<From, bf16> || std::is_same_v<From, f16>) return convert<To>(static_cast<float>(x));
  else if constexpr (std::is_same_v<To, Truth>) return Truth{static_cast<uint8_t>(x != 0)};
  else if constexpr (std::is_same_v<To, bf16> || std::is_same_v<To, f16>) return To(static_cast<float>(x));
  else if constexpr (std::is_integral_v<To> && std::is_floating_point_v<From>) {
    // Out of range and NaN give what the x86 conversion gives, with no undefined behaviour.
    if (!(x >= -9223372036854775808.0 && x < 9223372036854775808.0)) return static_cast<To>(std::numeric_limits<int64_t>::min());
    return static_cast<To>(static_cast<int64_t>(x));
  } else return static_cast<To>(x);
}

template <class Register, class Memory>
void load_block(void* to, const Block& block) {
  Register* dst = static_cast<Register*>(to);
  for (int64_t row = 0; row < block.rows; ++row) {
    const Memory* src = static_cast<const Memory*>(block.base) + block.row_offsets[row];
    for (int64_t c = 0; c < block.cols; ++c)
      *dst++ = convert<Register>(src[block.col_offsets ? block.col_offsets[c] : c * block.col_stride]);
  }
}

template <class Register, class Memory>
void store_block(const void* from, const Block& block) {
  const Register* src = static_cast<const Register*>(from);
  for (int64_t row = 0; row < block.rows; ++row) {
    Memory* dst = static_cast<Memory*>(const_cast<void*>(block.base)) + block.row_offsets[row];
    for (int64_t c = 0; c < block.cols; ++c)
      dst[block.col_offsets ? block.col_offsets[c] : c * block.col_stride] = convert<Memory>(*src++);
  }
}

template <class T>
KernelTable make_table() {
  KernelTable table;
  int op = 0;
#define FULMEN_FILL(name, Body, operands, kind, attributes) \
  fill_forms<pointwise::Body, operands, Kind::kind, T>(table.pointwise[op++]);
  FULMEN_POINTWISE_OPS(FULMEN_FILL)
#undef FULMEN_FILL
  table.reduce_rows[0] = reduce_rows<Fold::sum, T>;
  table.reduce_rows[1] = reduce_rows<Fold::max, T>;
  table.reduce_rows[2] = reduce_rows<Fold::min, T>;
  table.reduce_columns[0] = reduce_columns<Fold::sum, T>;
  table.reduce_columns[1] = reduce_columns<Fold::max, T>;
  table.reduce_columns[2] = reduce_columns<Fold::min, T>;
  table.multiply_reduce_rows = multiply_reduce_rows<T>;
  table.repeat = repeat<T>;
  table.spread = spread<T>;
#define FULMEN_MEMORY(dtype, Memory)                                          \
  table.load[static_cast<int>(DType::dtype)] = load_block<T, Memory>;         \
  table.store[static_cast<int>(DType::dtype)] = store_block<T, Memory>;
  FULMEN_MEMORY(boolean, Truth)
  FULMEN_MEMORY(u8, uint8_t)
  FULMEN_MEMORY(i8, int8_t)
  FULMEN_MEMORY(i16, int16_t)
  FULMEN_MEMORY(i32, int32_t)
  FULMEN_MEMORY(i64, int64_t)
  FULMEN_MEMORY(f16, f16)
  FULMEN_MEMORY(bf16, bf16)
  FULMEN_MEMORY(f32, float)
  FULMEN_MEMORY(f64, double)
#undef FULMEN_MEMORY
  return table;
}

template <class From, class To>
void convert_loop(const Work& work) {
  const int64_t count = work.rows * work.cols;
  for (int64_t i = 0; i < count; ++i) static_cast<To*>(work.dst)[i] = convert<To>(static_cast<const From*>(work.src[0])[i]);
}

void wrap_loop(const Work& work) {
  const int64_t count = work.rows * work.cols;
  const int unused = 64 - 8 * work.bits;
  for (int64_t i = 0; i < count; ++i) {
    const uint64_t high = static_cast<const uint64_t*>(work.src[0])[i] << unused;
    static_cast<int64_t*>(work.dst)[i] =
        work.is_signed ? static_cast<int64_t>(high) >> unused : static_cast<int64_t>(high >> unused);
  }
}

}  // namespace

const KernelTable& kernel_table(Domain domain, Isa isa) {
  static const KernelTable f64_table = make_table<double>();
  static const KernelTable i64_table = make_table<int64_t>();
  if (domain == Domain::f64) return f64_table;
  if (domain == Domain::i64) return i64_table;
#if defined(FULMEN_X86)
  if (isa >= Isa::avx512) return avx512::tile_table();
  if (isa == Isa::avx2) return avx2::tile_table();
#endif
  (void)isa;
  return generic::tile_table();
}

Kernel convert_kernel(Domain from, Domain to) {
  static constexpr Kernel kernels[domain_count][domain_count] = {
      {nullptr, convert_loop<float, double>, convert_loop<float, int64_t>},
      {convert_loop<double, float>, nullptr, convert_loop<double, int64_t>},
      {convert_loop<int64_t, float>, convert_loop<int64_t, double>, nullptr},
  };
  return kernels[static_cast<int>(from)][static_cast<int>(to)];
}

Kernel wrap_kernel() { return wrap_loop; }

}  // namespace fulmen::cpu::tile
