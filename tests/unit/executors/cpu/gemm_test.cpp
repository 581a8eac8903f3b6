// GemmPlan against a double loop: sizes, strides, dtypes, epilogues, batches, on every instruction set of the machine.
#include "executors/cpu/gemm/gemm.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "core/half.h"
#include "core/parallel.h"
#include "executors/cpu/dispatch.h"

namespace fulmen::cpu {
namespace {

double rounded(double v, DType dtype) {
  switch (dtype) {
    case DType::bf16: return static_cast<float>(bf16(static_cast<float>(v)));
    case DType::f16: return static_cast<float>(f16(static_cast<float>(v)));
    default: return static_cast<float>(v);
  }
}

// Bytes of a strided tensor with guard bytes on both sides.
struct Memory {
  DType dtype = DType::f32;
  std::vector<unsigned char> bytes;
  static constexpr size_t guard = 256;

  void allocate(DType type, int64_t elements) {
    dtype = type;
    bytes.assign(static_cast<size_t>(elements) * dtype_bytes(type) + 2 * guard, 0xa5);
  }
  unsigned char* data() { return bytes.data() + guard; }
  const unsigned char* data() const { return bytes.data() + guard; }
  double get(int64_t i) const {
    switch (dtype) {
      case DType::bf16: return static_cast<float>(reinterpret_cast<const bf16*>(data())[i]);
      case DType::f16: return static_cast<float>(reinterpret_cast<const f16*>(data())[i]);
      default: return reinterpret_cast<const float*>(data())[i];
    }
  }
  void set(int64_t i, double v) {
    const float f = static_cast<float>(v);
    switch (dtype) {
      case DType::bf16: reinterpret_cast<bf16*>(data())[i] = bf16(f); break;
      case DType::f16: reinterpret_cast<f16*>(data())[i] = f16(f); break;
      default: reinterpret_cast<float*>(data())[i] = f;
    }
  }
  // Every element, rounded to `type`.
  std::vector<double> values(DType type) const {
    std::vector<double> all((bytes.size() - 2 * guard) / dtype_bytes(dtype));
    for (size_t i = 0; i < all.size(); ++i) all[i] = rounded(get(static_cast<int64_t>(i)), type);
    return all;
  }
  void fill(std::mt19937& rng) {
    std::normal_distribution<double> normal;
    const int64_t n = static_cast<int64_t>((bytes.size() - 2 * guard) / dtype_bytes(dtype));
    for (int64_t i = 0; i < n; ++i) set(i, normal(rng));
  }
};

enum class Order { rows, columns, gaps, repeated_rows, scattered };

// Strides of an r x c matrix and how many elements it spans.
int64_t lay_out(Order order, int64_t r, int64_t c, GemmOperand& operand) {
  switch (order) {
    case Order::rows: operand.row_stride = c, operand.column_stride = 1; break;
    case Order::columns: operand.row_stride = 1, operand.column_stride = r; break;
    case Order::gaps: operand.row_stride = c + 5, operand.column_stride = 1; break;
    case Order::repeated_rows: operand.row_stride = 0, operand.column_stride = 1; break;
    case Order::scattered: operand.row_stride = 3 * c + 1, operand.column_stride = 3; break;
  }
  return r && c ? (r - 1) * operand.row_stride + (c - 1) * operand.column_stride + 1 : 0;
}

struct Case {
  int64_t m, n, k;
  std::vector<int64_t> batch{};
  Order a = Order::rows, b = Order::rows, c = Order::rows;
  DType a_dtype = DType::f32, b_dtype = DType::f32, c_dtype = DType::f32, compute = DType::f32;
  Epilogue epilogue{};
  bool repeat_a = false, repeat_b = false;  // batch stride 0
  bool prepack = false;
};

double activation_of(double x, Activation activation) {
  switch (activation) {
    case Activation::none: return x;
    case Activation::relu: return x > 0 ? x : 0;
    case Activation::gelu_erf: return 0.5 * x * std::erfc(-x * std::sqrt(0.5));
    case Activation::gelu_tanh: return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
    case Activation::silu: return x / (1 + std::exp(-x));
  }
  return x;
}

std::string words(const Case& t) {
  std::string s = "m " + std::to_string(t.m) + ", n " + std::to_string(t.n) + ", k " + std::to_string(t.k) + ", batch";
  for (int64_t b : t.batch) s += " " + std::to_string(b);
  s += ", orders " + std::to_string(static_cast<int>(t.a)) + std::to_string(static_cast<int>(t.b)) + std::to_string(static_cast<int>(t.c));
  for (DType d : {t.a_dtype, t.b_dtype, t.c_dtype, t.compute}) s += " " + std::string(dtype_name(d));
  return s + ", activation " + std::to_string(static_cast<int>(t.epilogue.activation)) + ", on " + std::string(isa_name(chosen_isa()));
}

class Gemm : public testing::Test {
 protected:
  void SetUp() override { before_ = chosen_isa(); }
  void TearDown() override {
    force_isa(before_);
    set_thread_count(0);
  }
  Isa before_ = Isa::generic;
  std::mt19937 rng_{20240607};

  void check(const Case& t) {
    GemmProblem p;
    p.m = t.m, p.n = t.n, p.k = t.k;
    p.batch_dims = static_cast<int>(t.batch.size());
    p.a.dtype = t.a_dtype, p.b.dtype = t.b_dtype, p.c.dtype = t.c_dtype, p.compute = t.compute;
    p.epilogue = t.epilogue;
    const int64_t a_span = lay_out(t.a, t.m, t.k, p.a), b_span = lay_out(t.b, t.k, t.n, p.b), c_span = lay_out(t.c, t.m, t.n, p.c);
    int64_t count = 1, c_batch = c_span + 7, a_batch = a_span + 3, b_batch = b_span + 1;
    if (t.c == Order::rows && t.a == Order::rows) c_batch = t.m * t.n, a_batch = t.m * t.k;  // rows that follow one another
    for (int d = p.batch_dims - 1; d >= 0; --d) {
      const size_t i = static_cast<size_t>(d);
      p.batch_sizes[i] = t.batch[i];
      p.a.batch_strides[i] = t.repeat_a ? 0 : a_batch * count;
      p.b.batch_strides[i] = t.repeat_b ? 0 : b_batch * count;
      p.c.batch_strides[i] = c_batch * count;
      count *= t.batch[i];
    }
    if (p.epilogue.has_residual) {
      p.epilogue.residual_row_stride = p.c.row_stride, p.epilogue.residual_column_stride = p.c.column_stride;
      p.epilogue.residual_batch_strides = p.c.batch_strides;
    }
    Memory a, b, c, bias, residual;
    a.allocate(t.a_dtype, (t.repeat_a ? 1 : count) * a_batch + a_span);
    b.allocate(t.b_dtype, (t.repeat_b ? 1 : count) * b_batch + b_span);
    c.allocate(t.c_dtype, count * c_batch + c_span);
    bias.allocate(p.epilogue.bias_dtype, t.n * std::max<int64_t>(1, p.epilogue.bias_stride));
    residual.allocate(p.epilogue.residual_dtype, count * c_batch + c_span);
    a.fill(rng_), b.fill(rng_), c.fill(rng_), bias.fill(rng_), residual.fill(rng_);

    const Memory c_before = c;
    std::vector<bool> written(c.bytes.size(), false);
        const GemmPlan plan(p);
    std::vector<unsigned char> workspace_memory(plan.workspace_bytes() + 64 + 256, 0x5a);
    unsigned char* workspace = workspace_memory.data();
    workspace += (64 - reinterpret_cast<uintptr_t>(workspace) % 64) % 64;
    if (t.prepack) {
      ASSERT_TRUE(plan.can_prepack_b());
      std::vector<float> packed_memory(plan.packed_b_bytes() / 4 + 16);
      auto* packed = reinterpret_cast<unsigned char*>(packed_memory.data());
      packed += (64 - reinterpret_cast<uintptr_t>(packed) % 64) % 64;
      plan.pack_b(b.data(), packed);
      plan.run_packed(a.data(), packed, c.data(), bias.data(), residual.data(), workspace);
    } else {
      plan.run(a.data(), b.data(), c.data(), bias.data(), residual.data(), workspace);
    }
    for (size_t i = static_cast<size_t>(workspace - workspace_memory.data()) + plan.workspace_bytes(); i < workspace_memory.size(); ++i)
      ASSERT_EQ(workspace_memory[i], 0x5a) << "workspace overrun; " << words(t);

    const std::vector<double> a_values = a.values(t.compute), b_values = b.values(t.compute);
    const double unit = t.c_dtype == DType::bf16 ? 1 / 256.0 : t.c_dtype == DType::f16 ? 1 / 2048.0 : 1.2e-7;
    for (int64_t index = 0; index < count; ++index) {
      int64_t at[4] = {}, rest = index;  // offsets of a, b, c
      for (int d = p.batch_dims - 1; d >= 0; --d) {
        const size_t i = static_cast<size_t>(d);
        const int64_t here = rest % t.batch[i];
        rest /= t.batch[i];
        at[0] += here * p.a.batch_strides[i], at[1] += here * p.b.batch_strides[i], at[2] += here * p.c.batch_strides[i];
      }
      for (int64_t i = 0; i < t.m; ++i)
        for (int64_t j = 0; j < t.n; ++j) {
          double sum = 0, size = 0;
          const double* x = a_values.data() + at[0] + i * p.a.row_stride;
          const double* y = b_values.data() + at[1] + j * p.b.column_stride;
          for (int64_t l = 0; l < t.k; ++l, x += p.a.column_stride, y += p.b.row_stride)
            sum += *x * *y, size += std::abs(*x * *y);
          const Epilogue& e = p.epilogue;
          const int64_t c_at = at[2] + i * p.c.row_stride + j * p.c.column_stride;
          double want = e.alpha * sum, scale = std::abs(e.alpha) * size;
          if (e.has_bias) want += bias.get(j * e.bias_stride), scale += std::abs(bias.get(j * e.bias_stride));
          want = activation_of(want, e.activation);
          if (e.has_residual) want += e.residual_scale * residual.get(c_at), scale += std::abs(e.residual_scale * residual.get(c_at));
          if (e.accumulate) want += c_before.get(c_at), scale += std::abs(c_before.get(c_at));
          const double tolerance = unit * std::abs(want) + 1.2e-7 * (4 + std::sqrt(static_cast<double>(t.k))) * scale + 1e-30;
          ASSERT_NEAR(c.get(c_at), want, tolerance) << "matrix " << index << ", row " << i << ", column " << j << "; " << words(t);
          const size_t bytes = dtype_bytes(t.c_dtype), begin = Memory::guard + static_cast<size_t>(c_at) * bytes;
          for (size_t byte = begin; byte < begin + bytes; ++byte) written[byte] = true;
        }
    }
    for (size_t i = 0; i < c.bytes.size(); ++i)
      if (!written[i]) {
        ASSERT_EQ(c.bytes[i], c_before.bytes[i]) << "byte " << i << " beside C changed; " << words(t);
      }
  }

  template <class F>
  void on_every_isa(F&& body) {
    for (Isa isa : available_isas()) {
      force_isa(isa);
      body();
      if (HasFatalFailure()) return;
    }
  }
};

TEST_F(Gemm, OddSizes) {
  const int64_t sizes[] = {0, 1, 2, 3, 5, 13, 17, 33, 67};
  on_every_isa([&] {
    for (int64_t m : sizes)
      for (int64_t n : sizes)
        for (int64_t k : sizes)
          for (DType compute : {DType::f32, DType::bf16}) {
            check({.m = m, .n = n, .k = k, .compute = compute});
            if (HasFatalFailure()) return;
          }
  });
}

TEST_F(Gemm, Strides) {
  on_every_isa([&] {
    for (auto [m, n, k] : {std::array<int64_t, 3>{37, 45, 71}, {3, 70, 41}, {70, 2, 41}, {16, 16, 64}})
      for (Order a : {Order::rows, Order::columns, Order::gaps, Order::repeated_rows, Order::scattered})
        for (Order b : {Order::rows, Order::columns, Order::gaps, Order::repeated_rows, Order::scattered})
          for (Order c : {Order::rows, Order::columns, Order::gaps, Order::scattered})
            for (DType compute : {DType::f32, DType::bf16}) {
              check({.m = m, .n = n, .k = k, .a = a, .b = b, .c = c, .compute = compute});
              if (HasFatalFailure()) return;
            }
  });
}

TEST_F(Gemm, Dtypes) {
  const DType dtypes[] = {DType::f32, DType::bf16, DType::f16};
  on_every_isa([&] {
    for (DType a : dtypes)
      for (DType b : dtypes)
        for (DType c : dtypes)
          for (DType compute : dtypes)
            for (Order order : {Order::rows, Order::columns})
              for (int64_t m : {2, 39}) {
                check({.m = m, .n = 35, .k = 50, .a = order, .b = order, .a_dtype = a, .b_dtype = b, .c_dtype = c, .compute = compute});
                if (HasFatalFailure()) return;
              }
  });
}

TEST_F(Gemm, Epilogues) {
  on_every_isa([&] {
    for (Activation activation : {Activation::none, Activation::relu, Activation::gelu_erf, Activation::gelu_tanh, Activation::silu})
      for (int form = 0; form < 16; ++form)
        for (auto [m, n] : {std::array<int64_t, 2>{33, 50}, {2, 130}, {77, 1}}) {
          Case t{.m = m, .n = n, .k = 19};
          t.epilogue.activation = activation;
          t.epilogue.has_bias = form & 1;
          t.epilogue.bias_stride = form & 8 ? 2 : 1;
          t.epilogue.bias_dtype = form & 8 ? DType::bf16 : DType::f32;
          t.epilogue.has_residual = form & 2;
          t.epilogue.residual_dtype = form & 8 ? DType::bf16 : DType::f32;
          t.epilogue.residual_scale = form & 8 ? -1.5f : 1.0f;
          t.epilogue.accumulate = form & 4;
          t.epilogue.alpha = form & 8 ? 0.25f : 1.0f;
          t.c = form & 8 ? Order::columns : Order::rows;
          check(t);
          if (HasFatalFailure()) return;
          if (form & 2) t.c_dtype = DType::bf16;
          check(t);
          if (HasFatalFailure()) return;
        }
  });
}

// Sums of nothing are the epilogue of zeros, in every way of cutting the work.
TEST_F(Gemm, EmptySums) {
  on_every_isa([&] {
    for (auto [m, n] : {std::array<int64_t, 2>{600, 5}, {600, 130}, {70, 700}, {1, 3000}, {3000, 1}})
      for (DType compute : {DType::f32, DType::bf16})
        for (bool accumulate : {false, true}) {
          Case t{.m = m, .n = n, .k = 0, .compute = compute};
          t.epilogue.has_bias = !accumulate;
          t.epilogue.activation = accumulate ? Activation::none : Activation::gelu_erf;
          t.epilogue.accumulate = accumulate;
          check(t);
          if (HasFatalFailure()) return;
        }
  });
}

TEST_F(Gemm, Batches) {
  on_every_isa([&] {
    for (DType compute : {DType::f32, DType::bf16})
      for (bool repeat_a : {false, true})
        for (bool repeat_b : {false, true})
          for (const auto& batch : {std::vector<int64_t>{5}, {2, 3}, {1, 2, 1, 3}, {0}, {2, 0}})
            for (int64_t m : {1, 20, 70})
              for (Order b : {Order::rows, Order::columns}) {
                check({.m = m, .n = 40, .k = 24, .batch = batch, .b = b, .compute = compute, .repeat_a = repeat_a, .repeat_b = repeat_b});
                check({.m = m, .n = 1, .k = 24, .batch = batch, .a = b, .c = Order::gaps, .compute = compute, .repeat_a = repeat_a, .repeat_b = repeat_b});
                if (HasFatalFailure()) return;
              }
  });
}

TEST_F(Gemm, LongSumsAndManyBlocks) {
  on_every_isa([&] {
    for (DType compute : {DType::f32, DType::bf16}) {
      check({.m = 35, .n = 37, .k = 5001, .compute = compute});
      check({.m = 300, .n = 290, .k = 130, .compute = compute});
      check({.m = 270, .n = 36, .k = 3100, .a = Order::columns, .compute = compute});
      check({.m = 140, .n = 70, .k = 1100, .a = Order::columns, .c = Order::gaps, .compute = compute});
      check({.m = 270, .n = 125, .k = 150, .b = Order::columns, .compute = compute});
      check({.m = 3, .n = 2100, .k = 33, .compute = compute});
      check({.m = 2, .n = 1030, .k = 33, .b = Order::columns, .compute = compute});
      if (HasFatalFailure()) return;
    }
  });
}

// Operands shared by the threads or packed by each task, sums whose chunks are kept in C or beside it.
TEST_F(Gemm, ThreadsTogether) {
  set_thread_count(3);
  on_every_isa([&] {
    for (DType compute : {DType::f32, DType::bf16}) {
      const int64_t n = compute == DType::f32 ? 390 : 770;
      check({.m = 150, .n = n, .k = 700, .a = compute == DType::f32 ? Order::rows : Order::columns, .b = Order::columns, .compute = compute});
      Case t{.m = 60, .n = n, .k = 1600, .b = Order::columns, .compute = compute};
      t.epilogue.has_bias = t.epilogue.has_residual = t.epilogue.accumulate = true;
      check(t);
      t.n = 36;
      t.a = Order::columns;
      t.epilogue.accumulate = false;
      check(t);
      t.m = 200;
      t.c_dtype = DType::bf16;
      t.epilogue.activation = Activation::gelu_erf;
      check(t);
      if (HasFatalFailure()) return;
    }
    check({.m = 70, .n = 200, .k = 1600, .batch = {2}, .a = Order::gaps, .b = Order::columns});
  });
}

TEST_F(Gemm, PackedOnce) {
  on_every_isa([&] {
    for (DType compute : {DType::f32, DType::bf16})
      for (int64_t m : {5, 300})
        for (int64_t k : {40, 3100}) {
          check({.m = m, .n = 45, .k = k, .b = Order::columns, .compute = compute, .prepack = true});
          if (HasFatalFailure()) return;
        }
  });
}

TEST_F(Gemm, ThreadCountDoesNotChangeBits) {
  on_every_isa([&] {
    for (DType compute : {DType::f32, DType::bf16})
      for (auto [m, n, k, across] : {std::array<int64_t, 4>{301, 150, 200}, {2, 900, 300}, {60, 700, 4100}, {150, 400, 700}, {301, 128, 200}, {301, 100, 1100, 1}}) {
        GemmProblem p;
        p.m = m, p.n = n, p.k = k;
        p.a.row_stride = across ? 1 : k, p.a.column_stride = across ? m : 1;
        p.b.row_stride = n, p.c.row_stride = n;
        p.compute = compute;
        std::vector<float> a(static_cast<size_t>(m * k)), b(static_cast<size_t>(k * n)), c1(static_cast<size_t>(m * n)), c3 = c1;
        std::normal_distribution<float> normal;
        for (auto& x : a) x = normal(rng_);
        for (auto& x : b) x = normal(rng_);
        const GemmPlan plan(p);
        std::vector<float> memory(plan.workspace_bytes() / 4 + 16);
        auto* workspace = reinterpret_cast<char*>(memory.data());
        workspace += (64 - reinterpret_cast<uintptr_t>(workspace) % 64) % 64;
        set_thread_count(1);
        plan.run(a.data(), b.data(), c1.data(), nullptr, nullptr, workspace);
        for (int threads : {3, 9}) {
          set_thread_count(threads);
          plan.run(a.data(), b.data(), c3.data(), nullptr, nullptr, workspace);
          ASSERT_EQ(std::memcmp(c1.data(), c3.data(), c1.size() * 4), 0) << m << " " << n << " " << k << ", " << threads << " threads";
        }
      }
  });
}

TEST_F(Gemm, NotANumberAndInfinityGoThrough) {
  on_every_isa([&] {
    for (DType compute : {DType::f32, DType::bf16})
      for (int64_t m : {1, 40}) {
        const int64_t n = 33, k = 37;
        GemmProblem p;
        p.m = m, p.n = n, p.k = k;
        p.a.row_stride = k, p.b.row_stride = n, p.c.row_stride = n;
        p.compute = compute;
        std::vector<float> a(static_cast<size_t>(m * k), 1.0f), b(static_cast<size_t>(k * n), 1.0f), c(static_cast<size_t>(m * n));
        b[5] = NAN;
        b[36 * 33 + 7] = INFINITY;
        gemm(p, a.data(), b.data(), c.data(), nullptr, nullptr, nullptr);
        for (int64_t i = 0; i < m; ++i)
          for (int64_t j = 0; j < n; ++j) {
            const float x = c[static_cast<size_t>(i * n + j)];
            if (j == 5) ASSERT_TRUE(std::isnan(x));
            else ASSERT_EQ(x, j == 7 ? INFINITY : 37.0f) << i << " " << j;
          }
      }
  });
}

}  // namespace
}  // namespace fulmen::cpu
