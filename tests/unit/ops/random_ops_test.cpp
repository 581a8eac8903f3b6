// Random ops: Philox's published answers, ranges and moments of what is drawn, and that a backward pass draws the
// forward's mask again.
#include <gtest/gtest.h>

#include <cmath>

#include "core/philox.h"
#include "executors/reference/evaluate.h"
#include "ops/builder.h"
#include "ops/reference_loops.h"
#include "passes/differentiate.h"

namespace fulmen {
namespace {

HostTensor seed_of(int64_t key, int64_t offset) {
  HostTensor seed = make_host(DType::i64, {2});
  seed.i = {key, offset};
  return seed;
}

HostTensor draw(const char* op, Attributes attrs, const HostTensor& seed) {
  Trace trace;
  const ValueId input = trace.add_input(parse_tensor_spec("i64[2]"));
  trace.outputs = {Builder(trace).emit1(op, {input}, std::move(attrs))};
  return evaluate(trace, {seed})[0];
}

// The answers that Random123 publishes for philox4x32-10.
TEST(Philox, KnownAnswers) {
  const PhiloxBlock zeros = philox4x32(0, 0, 0);
  EXPECT_EQ(zeros.word[0], 0x6627e8d5u);
  EXPECT_EQ(zeros.word[1], 0xe169c58du);
  EXPECT_EQ(zeros.word[2], 0xbc57ac4cu);
  EXPECT_EQ(zeros.word[3], 0x9b00dbd8u);
  const PhiloxBlock digits = philox4x32(0x299f31d0a4093822u, 0x85a308d3243f6a88u, 0x0370734413198a2eu);
  EXPECT_EQ(digits.word[0], 0xd16cfe09u);
  EXPECT_EQ(digits.word[1], 0x94fdccebu);
  EXPECT_EQ(digits.word[2], 0x5001e420u);
  EXPECT_EQ(digits.word[3], 0x24126ea1u);
}

TEST(RandomOps, UniformStaysBelowOneInEveryDtype) {
  for (DType dtype : {DType::f32, DType::bf16, DType::f16, DType::f64}) {
    const HostTensor drawn = draw("uniform", {{"shape", Dims{4096}}, {"dtype", dtype}}, seed_of(7, 0));
    double sum = 0;
    for (double value : drawn.f) {
      ASSERT_GE(value, 0.0);
      ASSERT_LT(value, 1.0);
      ASSERT_EQ(round_float(value, dtype), value) << dtype_name(dtype) << " can't hold it";
      sum += value;
    }
    EXPECT_NEAR(sum / 4096, 0.5, 0.02) << dtype_name(dtype);
  }
}

TEST(RandomOps, NormalHasItsMoments) {
  const HostTensor drawn = draw("normal", {{"shape", Dims{20000}}}, seed_of(123, 5));
  double sum = 0, squares = 0, fourth = 0;
  for (double value : drawn.f) {
    ASSERT_TRUE(std::isfinite(value));
    sum += value;
    squares += value * value;
    fourth += value * value * value * value;
  }
  EXPECT_NEAR(sum / 20000, 0.0, 0.03);
  EXPECT_NEAR(squares / 20000, 1.0, 0.05);
  EXPECT_NEAR(fourth / 20000, 3.0, 0.3);
}

TEST(RandomOps, DropoutKeepsItsShareAndFollowsTheSeed) {
  for (double p : {0.1, 0.5, 0.9}) {
    const HostTensor mask = draw("dropout_mask", {{"shape", Dims{20000}}, {"p", p}}, seed_of(1, 0));
    double kept = 0;
    for (int64_t value : mask.i) kept += static_cast<double>(value);
    EXPECT_NEAR(kept / 20000, 1 - p, 0.015);
  }
  const Attributes half = {{"shape", Dims{256}}, {"p", 0.5}};
  EXPECT_EQ(draw("dropout_mask", half, seed_of(1, 0)).i, draw("dropout_mask", half, seed_of(1, 0)).i);
  EXPECT_NE(draw("dropout_mask", half, seed_of(1, 0)).i, draw("dropout_mask", half, seed_of(2, 0)).i);
  EXPECT_NE(draw("dropout_mask", half, seed_of(1, 0)).i, draw("dropout_mask", half, seed_of(1, 64)).i);
}

// An offset of philox_draws(count) leaves the whole first call behind: the streams don't overlap.
TEST(RandomOps, OffsetsSeparateStreams) {
  const auto draws = static_cast<int64_t>(philox_draws(64));
  const HostTensor both = draw("uniform", {{"shape", Dims{128}}}, seed_of(9, 0));
  const HostTensor second = draw("uniform", {{"shape", Dims{64}}, {"offset", draws}}, seed_of(9, 0));
  for (size_t k = 0; k < 64; ++k) EXPECT_EQ(second.f[k], both.f[64 + k]);
}

TEST(RandomOps, BackwardDrawsTheForwardsMask) {
  Trace trace;
  const ValueId x = trace.add_input(parse_tensor_spec("f32[300]!")), seed = trace.add_input(parse_tensor_spec("i64[2]"));
  trace.outputs = {Builder(trace).emit1("dropout", {x, seed}, {{"p", 0.25}, {"offset", int64_t{16}}})};
  const JointTrace joint = differentiate(trace);
  HostTensor ones = make_host(DType::f32, {300});
  ones.f.assign(300, 1.0);
  const auto results = evaluate(joint.trace, {ones, seed_of(5, 3), ones});
  EXPECT_EQ(results[0].f, results[1].f);  // of ones, both are the mask over 1 - p
  size_t dropped = 0;
  for (double value : results[0].f) {
    EXPECT_TRUE(value == 0.0 || std::abs(value - 1 / 0.75) < 1e-12);
    dropped += value == 0.0;
  }
  EXPECT_GT(dropped, 40u);
  EXPECT_LT(dropped, 110u);
}

}  // namespace
}  // namespace fulmen
