// The CPU attention kernels against a float64 reference: random calls over every feature, layout, dtype and instruction
// set, canaries around every result; and named cases. A failure prints the seed: ATTENTION_SEED=n runs that call alone.
#include <gtest/gtest.h>

#include <cstdlib>

#include "core/parallel.h"
#include "executors/cpu/attention/attention.h"
#include "executors/cpu/dispatch.h"
#include "tests/unit/executors/cpu/attention_reference.h"

namespace fulmen::attention_test {
namespace {

using cpu::Isa;

struct AlignedBytes {
  explicit AlignedBytes(size_t bytes) : data(std::aligned_alloc(64, (bytes + 127) / 64 * 64)) { std::memset(data, 0xff, bytes); }
  ~AlignedBytes() { std::free(data); }
  void* data;
};

struct Produced {
  Tensor out, lse;
  std::vector<Tensor> gradients;  // six; type.shape empty where absent
};

// Equal keys or queries make gradients that cancel to less than bf16 products can show, so 16-bit operands are only
// broadcast over batch and heads.
Dims random_strides(std::mt19937& rng, const Dims& shape, uint32_t broadcast_dims) {
  std::vector<size_t> order = {0, 1, 2, 3};
  if (rng() % 2) std::shuffle(order.begin(), order.end() - 1, rng);
  if (rng() % 6 == 0) std::shuffle(order.begin(), order.end(), rng);
  Dims strides(4, 0);
  int64_t step = rng() % 8 == 0 ? 2 : 1;
  for (size_t o = 4; o-- > 0;) {
    strides[order[o]] = step;
    step *= std::max<int64_t>(shape[order[o]], 1);
    if (rng() % 4 == 0) step += static_cast<int64_t>(rng() % 5);
  }
  for (size_t d = 0; d < 4; ++d)
    if (shape[d] == 1 && rng() % 3 == 0) strides[d] = static_cast<int64_t>(rng() % 1000);
  if (broadcast_dims && rng() % 6 == 0) strides[rng() % broadcast_dims] = 0;
  return strides;
}

Tensor random_tensor(std::mt19937& rng, DType dtype, const Dims& shape, double spread) {
  Tensor t(dtype, shape, random_strides(rng, shape, is_half(dtype) ? 2 : 4));
  std::normal_distribution<double> normal(0.0, spread);
  t.for_each([&](int64_t offset) { t.set_at(offset, normal(rng)); });
  return t;
}

Tensor vector_tensor(DType dtype, const std::vector<double>& values) {
  Tensor t(dtype, {static_cast<int64_t>(values.size())});
  for (size_t i = 0; i < values.size(); ++i) t.set_at(t.origin + static_cast<int64_t>(i), values[i]);
  return t;
}

Operands random_operands(uint32_t seed) {
  std::mt19937 rng(seed);
  const auto pick = [&](std::initializer_list<int64_t> values) { return *(values.begin() + static_cast<int64_t>(rng() % values.size())); };
  Operands o;
  SdpaCall& c = o.call;
  const bool packed = rng() % 6 == 0;
  const int64_t batch = packed ? 1 : pick({1, 1, 2, 3}), key_heads = pick({1, 2, 3}), group = pick({1, 1, 1, 2, 4});
  const int64_t q = pick({1, 1, 2, 5, 17, 33, 64, 70, 100, 130, 0}), k = rng() % 2 ? q : pick({1, 3, 16, 31, 64, 65, 100, 129, 150, 300, 0});
  const int64_t d = pick({1, 4, 7, 8, 16, 24, 32, 40, 64, 80, 0}), dv = rng() % 2 ? d : pick({1, 5, 8, 16, 33, 64, 0});
  const DType dtype = static_cast<DType>(pick({static_cast<int64_t>(DType::f32), static_cast<int64_t>(DType::bf16), static_cast<int64_t>(DType::bf16), static_cast<int64_t>(DType::f16)}));
  const double spread = rng() % 8 == 0 ? 4.0 : 1.0;
  o.query = random_tensor(rng, dtype, {batch, key_heads * group, q, d}, spread);
  o.key = random_tensor(rng, dtype, {batch, key_heads, k, d}, spread);
  o.value = random_tensor(rng, dtype, {batch, key_heads, k, dv}, 1.0);
  o.out_grad = random_tensor(rng, dtype, {batch, key_heads * group, q, dv}, 1.0);
  c.query = o.query.type;
  c.key = o.key.type;
  c.value = o.value.type;
  c.scale = rng() % 6 == 0 ? static_cast<double>(pick({-1, 0, 1})) * 0.25 : 1.0 / std::sqrt(std::max<double>(1.0, static_cast<double>(d)));
  c.training = true;
  c.lower_right = rng() % 4 == 0;
  const bool masked = rng() % 2 == 0;
  if (!masked) c.is_causal = rng() % 2 == 0;
  if (rng() % 5 == 0) c.window_left = pick({0, 3, 20, 70});
  if (rng() % 5 == 0) c.window_right = pick({0, 3, 20, 70});
  if (rng() % 6 == 0) c.softcap = 3.0;
  if (masked) {
    const Dims shape = {rng() % 2 ? batch : 1, rng() % 2 ? key_heads * group : 1, rng() % 3 ? q : 1, rng() % 5 ? k : 1};
    const DType mask_dtype = static_cast<DType>(pick({static_cast<int64_t>(DType::boolean), static_cast<int64_t>(DType::boolean), static_cast<int64_t>(DType::f32), static_cast<int64_t>(dtype)}));
    o.mask = random_tensor(rng, mask_dtype, shape, 1.0);
    if (mask_dtype == DType::boolean) {
      const uint32_t density = 1 + rng() % 8;
      o.mask.for_each([&](int64_t offset) { o.mask.set_at(offset, rng() % 8 < density); });
    } else if (rng() % 3 == 0) {
      const double low = rng() % 2 ? -std::numeric_limits<double>::infinity() : mask_dtype == DType::f16 ? -65504.0 : mask_dtype == DType::bf16 ? -3.3895e38 : -3.4028234e38;
      o.mask.for_each([&](int64_t offset) { if (rng() % 2) o.mask.set_at(offset, low); });
    }
    c.mask = o.mask.type;
    c.mask->requires_grad = mask_dtype != DType::boolean;
  }
  const int64_t heads = key_heads * group;
  std::normal_distribution<double> normal(0.0, 1.0);
  std::vector<double> per_head;
  for (int64_t h = 0; h < heads; ++h) per_head.push_back(normal(rng));
  if (rng() % 6 == 0) o.sink = vector_tensor(DType::f32, per_head), c.sink = o.sink.type;
  for (double& x : per_head) x = std::abs(x) * 0.1;
  if (rng() % 6 == 0) o.slopes = vector_tensor(DType::f32, per_head), c.alibi_slopes = o.slopes.type;
  if (packed) {
    const int64_t count = pick({1, 2, 3, 5});
    const auto offsets = [&](int64_t length) {
      std::vector<double> values;
      for (int64_t s = 0; s <= count; ++s) values.push_back(static_cast<double>(rng() % static_cast<uint32_t>(length + 1)));
      std::sort(values.begin(), values.end());
      if (rng() % 2) values.front() = 0, values.back() = static_cast<double>(length);
      return vector_tensor(DType::i32, values);
    };
    o.query_offsets = offsets(q);
    o.key_offsets = q == k && rng() % 2 ? o.query_offsets : offsets(k);
    c.query_offsets = o.query_offsets.type;
    c.key_offsets = o.key_offsets.type;
  }
  if (rng() % 6 == 0) {
    std::vector<double> lengths;
    for (int64_t b = 0; b < batch; ++b) lengths.push_back(static_cast<double>(rng() % static_cast<uint32_t>(k + 2)));
    o.key_lengths = vector_tensor(DType::i32, lengths);
    c.key_lengths = o.key_lengths.type;
  }
  if (rng() % 5 == 0) {
    c.dropout_p = static_cast<double>(pick({10, 50, 100})) / 100.0;
    o.seed = vector_tensor(DType::i64, {static_cast<double>(rng()), static_cast<double>(rng())});
    c.seed = o.seed.type;
  }
  return o;
}

// With little room for gradients of queries, heads of a group come by in passes.
Produced run_kernels(const Operands& o, std::mt19937 rng, int64_t query_gradient_floats = 0) {
  const SdpaCall& c = o.call;
  Produced p;
  p.out = Tensor(c.query.dtype, {c.batch(), c.heads(), c.query_len(), c.value_dim()}, random_strides(rng, {c.batch(), c.heads(), c.query_len(), c.value_dim()}, 0));
  p.lse = Tensor(DType::f32, {c.batch(), c.heads(), c.query_len()});
  const auto data = [](const Tensor& t) -> const void* { return t.bytes.empty() ? nullptr : t.data(); };
  const void* inputs[sdpa_backward_operand_count] = {data(o.query), data(o.key), data(o.value), data(o.mask), data(o.sink), data(o.slopes), data(o.query_offsets), data(o.key_offsets),
                                                     data(o.key_lengths), data(o.seed), nullptr, nullptr, nullptr};
  {
    const auto kernel = cpu::make_attention_forward(c, p.out.type, &p.lse.type);
    AlignedBytes workspace(kernel->workspace_bytes());
    void* outputs[2] = {p.out.data(), p.lse.data()};
    kernel->run({nullptr, 0, workspace.data}, inputs, outputs);
  }
  const TensorType* like[6] = {&c.query, &c.key, &c.value, c.mask && c.mask->requires_grad ? &*c.mask : nullptr, c.sink ? &*c.sink : nullptr, c.alibi_slopes ? &*c.alibi_slopes : nullptr};
  cpu::SdpaGradientTypes types{};
  void* outputs[6] = {};
  p.gradients.resize(6);
  for (size_t i = 0; i < 6; ++i) {
    if (!like[i]) continue;
    p.gradients[i] = i < 4 ? Tensor(like[i]->dtype, like[i]->shape, random_strides(rng, like[i]->shape, 0)) : Tensor(DType::f32, like[i]->shape);
    types[i] = &p.gradients[i].type;
    outputs[i] = p.gradients[i].data();
  }
  inputs[sdpa_out] = p.out.data();
  inputs[sdpa_lse] = p.lse.data();
  inputs[sdpa_out_grad] = o.out_grad.data();
  const auto kernel = cpu::make_attention_backward(c, p.out.type, o.out_grad.type, types, query_gradient_floats);
  AlignedBytes workspace(kernel->workspace_bytes());
  kernel->run({nullptr, 0, workspace.data}, inputs, outputs);
  return p;
}

// Largest error relative to the largest value; infinity where one side is not finite and the other is.
double relative_error(const Tensor& got, const std::vector<double>& expected, double floor) {
  double scale = floor, worst = 0;
  for (double x : expected)
    if (std::isfinite(x)) scale = std::max(scale, std::abs(x));
  size_t i = 0;
  got.for_each([&](int64_t offset) {
    const double a = got.get_at(offset), b = expected[i++];
    if (a == b) return;
    worst = std::isfinite(a) && std::isfinite(b) ? std::max(worst, std::abs(a - b) / scale) : std::numeric_limits<double>::infinity();
  });
  return worst;
}

double tolerance(DType dtype) { return dtype == DType::f32 ? 4e-5 : dtype == DType::f16 ? 4e-3 : 2.5e-2; }

std::string describe(const Operands& o) {
  const SdpaCall& c = o.call;
  std::string text = "query " + to_string(c.query) + " key " + to_string(c.key) + " value " + to_string(c.value);
  if (c.mask) text += " mask " + to_string(*c.mask);
  text += " causal " + std::to_string(c.is_causal) + " lower_right " + std::to_string(c.lower_right) + " window " + std::to_string(c.window_left) + "," + std::to_string(c.window_right) +
          " softcap " + std::to_string(c.softcap) + " scale " + std::to_string(c.scale) + " dropout " + std::to_string(c.dropout_p);
  if (c.sink) text += " sink";
  if (c.alibi_slopes) text += " slopes";
  if (c.query_offsets) text += " packed";
  if (c.key_lengths) text += " key_lengths";
  return text;
}

void check(const Operands& o, uint32_t seed, Isa isa) {
  SCOPED_TRACE("ATTENTION_SEED=" + std::to_string(seed) + " on " + std::string(cpu::isa_name(isa)) + ": " + describe(o));
  cpu::force_isa(isa);
  ASSERT_FALSE(cpu::attention_refusal(o.call).has_value());
  const Reference expected = reference_attention(o);
  const Produced got = run_kernels(o, std::mt19937(seed));
  const double limit = tolerance(o.call.query.dtype);
  EXPECT_LE(relative_error(got.out, expected.out, 0.1), limit) << "out";
  EXPECT_LE(relative_error(got.lse, expected.lse, 1.0), 2e-5) << "lse";
  EXPECT_EQ(got.out.broken_canaries(), 0) << "out";
  EXPECT_EQ(got.lse.broken_canaries(), 0) << "lse";
  const std::vector<double>* parts[6] = {&expected.query, &expected.key, &expected.value, &expected.mask, &expected.sink, &expected.slopes};
  const char* names[6] = {"query", "key", "value", "mask", "sink", "slopes"};
  for (size_t i = 0; i < 6; ++i) {
    if (got.gradients[i].bytes.empty()) continue;
    // Sums over many rows of rounded parts: more room for the small vectors.
    EXPECT_LE(relative_error(got.gradients[i], *parts[i], i < 3 ? 0.3 : 1.0), i < 4 ? 2 * limit : 16 * limit) << "gradient of " << names[i];
    EXPECT_EQ(got.gradients[i].broken_canaries(), 0) << "gradient of " << names[i];
  }
}

class AttentionOnEachIsa : public ::testing::TestWithParam<Isa> {
 protected:
  void TearDown() override { cpu::force_isa(cpu::available_isas().front()); }
};

TEST_P(AttentionOnEachIsa, AgreesWithReferenceOnRandomCalls) {
  if (const char* only = std::getenv("ATTENTION_SEED")) return check(random_operands(static_cast<uint32_t>(std::atoi(only))), static_cast<uint32_t>(std::atoi(only)), GetParam());
  const char* count = std::getenv("ATTENTION_CALLS");
  const uint32_t calls = count ? static_cast<uint32_t>(std::atoi(count)) : 60;
  for (uint32_t seed = 1; seed <= calls && !HasFailure(); ++seed) check(random_operands(seed), seed, GetParam());
}

TEST_P(AttentionOnEachIsa, SameBitsForAnyNumberOfThreads) {
  cpu::force_isa(GetParam());
  for (uint32_t seed : {11u, 23u, 35u, 47u, 59u, 71u, 83u, 95u}) {
    const Operands o = random_operands(seed);
    set_thread_count(1);
    const Produced one = run_kernels(o, std::mt19937(seed));
    for (int threads : {2, 5}) {
      set_thread_count(threads);
      const Produced many = run_kernels(o, std::mt19937(seed));
      EXPECT_EQ(one.out.bytes, many.out.bytes) << seed;
      EXPECT_EQ(one.lse.bytes, many.lse.bytes) << seed;
      for (size_t i = 0; i < 6; ++i) EXPECT_EQ(one.gradients[i].bytes, many.gradients[i].bytes) << seed << " gradient " << i;
    }
    set_thread_count(0);
  }
}

TEST_P(AttentionOnEachIsa, SameBitsHoweverManyHeadsGoTogether) {
  cpu::force_isa(GetParam());
  int grouped = 0;
  for (uint32_t seed = 1; seed <= 60; ++seed) {
    const Operands o = random_operands(seed);
    if (o.call.heads() == o.call.key_heads()) continue;
    ++grouped;
    const Produced together = run_kernels(o, std::mt19937(seed));
    const int64_t head_floats = std::max<int64_t>(1, o.call.query_len() * o.call.head_dim());
    for (int64_t floats : {int64_t{1}, 4 * head_floats})
      for (int threads : {1, 2, 5}) {
        set_thread_count(threads);
        const Produced passes = run_kernels(o, std::mt19937(seed), floats);
        for (size_t i = 0; i < 6; ++i) EXPECT_EQ(together.gradients[i].bytes, passes.gradients[i].bytes) << seed << " gradient " << i;
      }
    set_thread_count(0);
  }
  EXPECT_GT(grouped, 10);
}

// Calls given by their sizes; everything else contiguous and plain unless `change` says otherwise.
template <class F>
Operands plain_operands(DType dtype, int64_t batch, int64_t heads, int64_t key_heads, int64_t q, int64_t k, int64_t d, const F& change) {
  Operands o;
  std::mt19937 rng(7);
  std::normal_distribution<double> normal(0.0, 1.0);
  const auto filled = [&](Dims shape) {
    Tensor t(dtype, std::move(shape));
    t.for_each([&](int64_t offset) { t.set_at(offset, normal(rng)); });
    return t;
  };
  o.query = filled({batch, heads, q, d});
  o.key = filled({batch, key_heads, k, d});
  o.value = filled({batch, key_heads, k, d});
  o.out_grad = filled({batch, heads, q, d});
  o.call.scale = 1.0 / std::sqrt(static_cast<double>(d));
  change(o);
  o.call.query = o.query.type;
  o.call.key = o.key.type;
  o.call.value = o.value.type;
  return o;
}

TEST_P(AttentionOnEachIsa, CrossesBlocksOfLongSequences) {
  for (DType dtype : {DType::f32, DType::bf16}) {
    check(plain_operands(dtype, 1, 2, 1, 413, 600, 16, [](Operands& o) { o.call.is_causal = o.call.lower_right = true; }), 0, GetParam());
    check(plain_operands(dtype, 1, 1, 1, 600, 413, 16, [](Operands& o) { o.call.window_left = 100, o.call.window_right = 170; }), 0, GetParam());
  }
}

TEST_P(AttentionOnEachIsa, SplitsKeysForFewQueries) {
  for (DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    check(plain_operands(dtype, 1, 4, 1, 1, 2500, 20, [](Operands&) {}), 0, GetParam());
    check(plain_operands(dtype, 2, 2, 2, 3, 1300, 8, [](Operands& o) { o.call.is_causal = o.call.lower_right = true; }), 0, GetParam());
  }
}

TEST_P(AttentionOnEachIsa, IgnoresWhatLiesPastAKeyLength) {
  for (DType dtype : {DType::f32, DType::bf16, DType::f16})
    for (int64_t q : {2, 40}) {
      const Operands o = plain_operands(dtype, 2, 2, 2, q, 100, 16, [](Operands& changed) {
        changed.key_lengths = vector_tensor(DType::i32, {37, 0});
        changed.call.key_lengths = changed.key_lengths.type;
        for (Tensor* t : {&changed.key, &changed.value})
          for (int64_t b = 0; b < 2; ++b)
            for (int64_t h = 0; h < 2; ++h)
              for (int64_t j = b == 0 ? 37 : 0; j < 100; ++j)
                for (int64_t c = 0; c < 16; ++c) t->set_at(t->at({b, h, j, c}), std::numeric_limits<double>::quiet_NaN());
      });
      cpu::force_isa(GetParam());
      const Produced p = run_kernels(o, std::mt19937(1));
      p.out.for_each([&](int64_t offset) { EXPECT_TRUE(std::isfinite(p.out.get_at(offset))); });
      for (size_t i = 0; i < 3; ++i) p.gradients[i].for_each([&](int64_t offset) { EXPECT_TRUE(std::isfinite(p.gradients[i].get_at(offset))) << i; });
      // The second batch entry has no open key at all.
      for (int64_t h = 0; h < 2; ++h)
        for (int64_t i = 0; i < q; ++i) {
          EXPECT_EQ(p.lse.get({1, h, i}), -std::numeric_limits<double>::infinity());
          for (int64_t c = 0; c < 16; ++c) EXPECT_EQ(p.out.get({1, h, i, c}), 0.0);
        }
    }
}

// Scratch grows with the length, and stays below 64 MiB at 16,384 unless the gradient of a full bias is asked for.
TEST_P(AttentionOnEachIsa, NeedsAtMost64MiBAtLength16384) {
  cpu::force_isa(GetParam());
  set_thread_count(2);
  constexpr int64_t length = 16384, heads = 8;
  for (DType dtype : {DType::f32, DType::bf16, DType::f16})
    for (int64_t dims : {64, 128, 256})
      for (int64_t key_heads : {8, 2, 1})
        for (const char* form : {"plain", "causal", "window", "softcap", "bool mask", "bias", "learned bias a key", "learned bias a query", "sink and slopes", "dropout", "packed"}) {
          const std::string name = form;
          SdpaCall call;
          call.query = contiguous_type(dtype, {1, heads, length, dims});
          call.key = call.value = contiguous_type(dtype, {1, key_heads, length, dims});
          call.scale = 0.1;
          call.training = true;
          if (name == "causal") call.is_causal = true;
          if (name == "window") call.window_left = 1000, call.window_right = 0;
          if (name == "softcap") call.softcap = 30;
          if (name == "bool mask") call.mask = contiguous_type(DType::boolean, {1, 1, length, length});
          if (name == "bias") call.mask = contiguous_type(dtype, {1, heads, length, length});
          if (name == "learned bias a key") call.mask = contiguous_type(dtype, {1, heads, 1, length});
          if (name == "learned bias a query") call.mask = contiguous_type(dtype, {1, heads, length, 1});
          if (name == "sink and slopes") call.sink = call.alibi_slopes = contiguous_type(DType::f32, {heads});
          if (name == "dropout") call.dropout_p = 0.1, call.seed = contiguous_type(DType::i64, {2});
          if (name == "packed") call.query_offsets = call.key_offsets = contiguous_type(DType::i32, {5});
          const TensorType lse = contiguous_type(DType::f32, {1, heads, length});
          cpu::SdpaGradientTypes wanted = {&call.query, &call.key, &call.value};
          if (name.find("learned") == 0) wanted[3] = &*call.mask;
          if (call.sink) wanted[4] = wanted[5] = &*call.sink;
          SCOPED_TRACE(name + " " + to_string(call.query) + " key heads " + std::to_string(key_heads));
          EXPECT_LE(cpu::make_attention_forward(call, call.query, &lse)->workspace_bytes(), size_t{64} << 20);
          EXPECT_LE(cpu::make_attention_backward(call, call.query, call.query, wanted)->workspace_bytes(), size_t{64} << 20);
        }
  set_thread_count(0);
}

TEST(AttentionRefusal, NamesArgumentFoundAndLimit) {
  SdpaCall call = plain_operands(DType::f32, 1, 1, 1, 2, 2, 4, [](Operands&) {}).call;
  EXPECT_FALSE(cpu::attention_refusal(call).has_value());
  call.value.dtype = DType::f64;
  ASSERT_TRUE(cpu::attention_refusal(call).has_value());
  EXPECT_EQ(cpu::attention_refusal(call)->code, RefusalCode::wrong_dtype);
  EXPECT_EQ(cpu::attention_refusal(call)->reason, "sdpa: value is f64, the cpu kernels take f32, bf16 and f16");
  call.value.dtype = DType::f32;
  call.dropout_p = 0.5;
  ASSERT_TRUE(cpu::attention_refusal(call).has_value());
  EXPECT_EQ(cpu::attention_refusal(call)->code, RefusalCode::unsupported_argument);
}

// The published test vectors of the generator.
TEST(Philox, GivesThePublishedWords) {
  const PhiloxBlock zero = philox4x32(0, 0, 0);
  EXPECT_EQ(zero.word[0], 0x6627e8d5u);
  EXPECT_EQ(zero.word[3], 0x9b00dbd8u);
  const PhiloxBlock pi = philox4x32(0x299f31d0a4093822u, 0x85a308d3243f6a88u, 0x0370734413198a2eu);
  EXPECT_EQ(pi.word[0], 0xd16cfe09u);
  EXPECT_EQ(pi.word[3], 0x24126ea1u);
}

INSTANTIATE_TEST_SUITE_P(Cpu, AttentionOnEachIsa, ::testing::ValuesIn(cpu::available_isas()), [](const auto& info) { return std::string(cpu::isa_name(info.param)); });

}  // namespace
}  // namespace fulmen::attention_test
