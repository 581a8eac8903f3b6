// The meaning of attention calls, by numbers that can be checked by hand or come from public reports (ids Cnn: cases of
// bug reports that the project collects).
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "core/philox.h"
#include "ops/attention_parts.h"
#include "ops/sdpa_call.h"
#include "tests/unit/ops/evaluated.h"

namespace fulmen {
namespace {

using testing_ops::absent;
using testing_ops::gradients;
using testing_ops::Operand;
using testing_ops::OpRun;
using testing_ops::run_op;

constexpr double infinity = std::numeric_limits<double>::infinity();

std::vector<double> random_values(size_t count, unsigned seed) {
  std::mt19937 rng(seed);
  std::normal_distribution<double> normal;
  std::vector<double> values(count);
  for (double& value : values) value = normal(rng);
  return values;
}

std::vector<Operand> with(std::vector<Operand> operands, SdpaOperand at, Operand operand) {
  operands.resize(std::max<size_t>(operands.size(), static_cast<size_t>(at) + 1));
  operands[static_cast<size_t>(at)] = std::move(operand);
  return operands;
}

TEST(AttentionOps, CausalCornerIsTopLeftC32) {
  const OpRun wide = run_op("sdpa", {{"f64[2,1]", {1, 2}}, {"f64[5,1]", {0, 1, 2, 3, 4}}, {"f64[5,1]", {0, 1, 2, 3, 4}}},
                          {{"is_causal", true}, {"scale", 1.0}});
  EXPECT_NEAR(wide.outputs[0].f[0], 0.0, 1e-12);
  EXPECT_NEAR(wide.outputs[0].f[1], 0.880797, 1e-6);
  // Five queries, two keys: one key is open in the first row, both in the others. Values 0 and 1 with equal logits.
  const OpRun tall = run_op("sdpa", {{"f64[5,1]", {0}}, {"f64[2,1]", {0, 1}}, {"f64[2,1]", {0, 1}}}, {{"is_causal", true}});
  EXPECT_EQ(tall.outputs[0].f, (std::vector<double>{0, 0.5, 0.5, 0.5, 0.5}));
}

TEST(AttentionOps, LowerRightCornerEndsAtTheLastKeyC34) {
  const Attributes attrs{{"is_causal", true}, {"lower_right", true}};
  const OpRun wide = run_op("sdpa", {{"f64[2,1]", {0}}, {"f64[4,1]", {0}}, {"f64[4,1]", {1, 2, 3, 10}}}, attrs);
  EXPECT_EQ(wide.outputs[0].f, (std::vector<double>{2, 4}));
  const OpRun tall = run_op("sdpa", {{"f64[4,1]!", {0}}, {"f64[2,1]!", {0}}, {"f64[2,1]!", {1, 3}}}, attrs);
  EXPECT_EQ(tall.outputs[0].f, (std::vector<double>{0, 0, 1, 2}));
  const auto grads = gradients(tall);
  EXPECT_EQ(grads[0].f, (std::vector<double>{0, 0, 0, 0}));
  EXPECT_EQ(grads[2].f, (std::vector<double>{1.5, 0.5}));
}

TEST(AttentionOps, ScaleMayBeNegativeOrZeroC43) {
  const std::vector<Operand> operands = {{"f64[1,1]!", {1}}, {"f64[2,1]!", {0, 2}}, {"f64[2,1]!", {0, 1}}};
  EXPECT_NEAR(run_op("sdpa", operands, {{"scale", -0.5}}).outputs[0].f[0], 0.268941, 1e-6);
  const OpRun zero = run_op("sdpa", operands, {{"scale", 0.0}});
  EXPECT_DOUBLE_EQ(zero.outputs[0].f[0], 0.5);
  const auto grads = gradients(zero);
  EXPECT_EQ(grads[0].f, std::vector<double>{0});
  EXPECT_EQ(grads[1].f, (std::vector<double>{0, 0}));
  EXPECT_EQ(grads[2].f, (std::vector<double>{0.5, 0.5}));
}

TEST(AttentionOps, RowWithNoOpenKeyGivesZerosC11) {
  std::vector<double> mask;
  for (int i = 0; i < 6; ++i)
    for (int j = 0; j < 10; ++j) mask.push_back(i < 5 && j <= i);
  const OpRun run = run_op("sdpa", {{"f32[1,2,6,8]!", random_values(96, 1)},
                                  {"f32[1,2,10,8]!", random_values(160, 2)},
                                  {"f32[1,2,10,8]!", random_values(160, 3)},
                                  {"bool[6,10]", mask}},
                         {{"return_lse", true}});
  const auto grads = gradients(run, {testing_ops::host_of(run.outputs[0].type, {1.0}), testing_ops::host_of(run.outputs[1].type, {1.0})});
  for (size_t head = 0; head < 2; ++head) {
    EXPECT_EQ(run.outputs[1].f[head * 6 + 5], -infinity);
    for (size_t d = 0; d < 8; ++d) {
      EXPECT_EQ(run.outputs[0].f[(head * 6 + 5) * 8 + d], 0.0);
      EXPECT_EQ(grads[0].f[(head * 6 + 5) * 8 + d], 0.0);
    }
    for (size_t j = 5; j < 10; ++j)
      for (size_t d = 0; d < 8; ++d) {
        EXPECT_EQ(grads[1].f[(head * 10 + j) * 8 + d], 0.0);
        EXPECT_EQ(grads[2].f[(head * 10 + j) * 8 + d], 0.0);
      }
  }
  for (const auto& grad : grads)
    for (double value : grad.f) EXPECT_TRUE(std::isfinite(value));
}

TEST(AttentionOps, BoolMaskOpensKeysC26) {
  const OpRun run = run_op("sdpa", {{"f64[2,1]", {0}}, {"f64[3,1]", {0}}, {"f64[3,1]", {1, 2, 6}}, {"bool[2,3]", {1, 0, 1, 0, 0, 0}}});
  EXPECT_EQ(run.outputs[0].f, (std::vector<double>{3.5, 0}));
}

TEST(AttentionOps, AddedMaskOfMinusInfinityClosesKeys) {
  const OpRun run = run_op("sdpa", {{"f64[2,1]!", {0}}, {"f64[2,1]!", {0}}, {"f64[2,1]!", {4, 2}},
                                  {"f64[2,2]!", {0, -infinity, -infinity, -infinity}}});
  EXPECT_EQ(run.outputs[0].f, (std::vector<double>{4, 0}));
  for (const auto& grad : gradients(run))
    for (double value : grad.f) EXPECT_TRUE(std::isfinite(value));
}

TEST(AttentionOps, EmptySizesGiveEmptyOrZeroResultsC46) {
  EXPECT_EQ(run_op("sdpa", {{"bf16[0,0,2,0]", {0}}, {"bf16[0,0,2,0]", {0}}, {"bf16[0,0,2,0]", {0}}}).outputs[0].type.shape, (Dims{0, 0, 2, 0}));
  const OpRun no_keys = run_op("sdpa", {{"f32[1,1,2,4]!", {1}}, {"f32[1,1,0,4]!", {1}}, {"f32[1,1,0,3]!", {1}}}, {{"return_lse", true}});
  EXPECT_EQ(no_keys.outputs[0].f, std::vector<double>(6, 0.0));
  EXPECT_EQ(no_keys.outputs[1].f, std::vector<double>(2, -infinity));
  EXPECT_EQ(gradients(no_keys)[0].f, std::vector<double>(8, 0.0));
}

TEST(AttentionOps, GroupsShareKeyHeadsAndTheirGradientIsTheSum) {
  const auto q = random_values(4 * 3 * 2, 4), k = random_values(2 * 5 * 2, 5), v = random_values(2 * 5 * 2, 6);
  const OpRun grouped = run_op("sdpa", {{"f64[4,3,2]!", q}, {"f64[2,5,2]!", k}, {"f64[2,5,2]!", v}}, {{"enable_gqa", true}});
  std::vector<double> wide_k, wide_v;  // heads 0, 0, 1, 1
  for (size_t head : {0, 0, 1, 1})
    for (size_t e = 0; e < 10; ++e) {
      wide_k.push_back(k[head * 10 + e]);
      wide_v.push_back(v[head * 10 + e]);
    }
  const OpRun plain = run_op("sdpa", {{"f64[4,3,2]!", q}, {"f64[4,5,2]!", wide_k}, {"f64[4,5,2]!", wide_v}});
  const auto grouped_grads = gradients(grouped), plain_grads = gradients(plain);
  for (size_t e = 0; e < q.size(); ++e) {
    EXPECT_NEAR(grouped.outputs[0].f[e], plain.outputs[0].f[e], 1e-12);
    EXPECT_NEAR(grouped_grads[0].f[e], plain_grads[0].f[e], 1e-12);
  }
  for (size_t operand : {1, 2})
    for (size_t head = 0; head < 2; ++head)
      for (size_t e = 0; e < 10; ++e)
        EXPECT_NEAR(grouped_grads[operand].f[head * 10 + e],
                    plain_grads[operand].f[2 * head * 10 + e] + plain_grads[operand].f[(2 * head + 1) * 10 + e], 1e-12);
}

TEST(AttentionOps, WindowKeepsNeighbours) {
  // Equal logits: each row is the mean of the open values. Left 1, right 0.
  const OpRun run = run_op("sdpa", {{"f64[4,1]", {0}}, {"f64[4,1]", {0}}, {"f64[4,1]", {1, 3, 5, 9}}},
                         {{"window_left", int64_t{1}}, {"window_right", int64_t{0}}});
  EXPECT_EQ(run.outputs[0].f, (std::vector<double>{1, 2, 4, 7}));
}

TEST(AttentionOps, SinkTakesPartInTheSoftmaxOnly) {
  // Two keys with logit 0 and a sink of log 2: weights 1/4, 1/4, and 1/2 for nothing.
  const auto operands = with({{"f64[1,1,1,1]!", {0}}, {"f64[1,1,2,1]", {0}}, {"f64[1,1,2,1]", {2, 6}}}, sdpa_sink, {"f64[1]!", {std::log(2.0)}});
  const OpRun run = run_op("sdpa", operands, {{"return_lse", true}});
  EXPECT_NEAR(run.outputs[0].f[0], 2.0, 1e-12);
  EXPECT_NEAR(run.outputs[1].f[0], std::log(4.0), 1e-12);
  // d out / d sink = -out times the sink's share
  EXPECT_NEAR(gradients(run, {testing_ops::host_of(run.outputs[0].type, {1.0}), testing_ops::host_of(run.outputs[1].type, {0.0})})[1].f[0], -1.0, 1e-12);
}

TEST(AttentionOps, SlopesWeighDistances) {
  // One query at position 0, slope log 2: weights 1, 1/2, 1/4 over 7/4.
  const auto operands = with({{"f64[1,1,1,1]", {0}}, {"f64[1,1,3,1]", {0}}, {"f64[1,1,3,1]", {7, 7, 14}}}, sdpa_alibi_slopes, {"f64[1]", {std::log(2.0)}});
  EXPECT_NEAR(run_op("sdpa", operands).outputs[0].f[0], (7 + 3.5 + 3.5) * 4 / 7, 1e-12);
}

TEST(AttentionOps, SoftcapBoundsLogits) {
  const OpRun run = run_op("sdpa", {{"f64[1,1]", {100}}, {"f64[2,1]", {0, 1}}, {"f64[2,1]", {0, 1}}}, {{"scale", 1.0}, {"softcap", 2.0}});
  EXPECT_NEAR(run.outputs[0].f[0], 1.0 / (1.0 + std::exp(-2.0)), 1e-12);
}

TEST(AttentionOps, KeyLengthsCloseTheRest) {
  const auto operands = with({{"f64[3,1,1,1]", {0}}, {"f64[3,1,3,1]", {0}}, {"f64[3,1,3,1]", {1, 3, 8, 1, 3, 8, 1, 3, 8}}}, sdpa_key_lengths, {"i32[3]", {2, 3, 0}});
  EXPECT_EQ(run_op("sdpa", operands).outputs[0].f, (std::vector<double>{2, 4, 0}));
}

TEST(AttentionOps, PackedSequencesSeeTheirOwnKeysOnly) {
  // Sequences of 2 and 1 queries over 2 and 2 keys; one query behind the last offset belongs to none.
  auto operands = with({{"f64[1,1,4,1]", {0}}, {"f64[1,1,4,1]", {0}}, {"f64[1,1,4,1]", {1, 3, 10, 20}}}, sdpa_query_offsets, {"i32[3]", {0, 2, 3}});
  operands = with(operands, sdpa_key_offsets, {"i32[3]", {0, 2, 4}});
  EXPECT_EQ(run_op("sdpa", operands).outputs[0].f, (std::vector<double>{2, 2, 15, 0}));
  EXPECT_EQ(run_op("sdpa", operands, {{"is_causal", true}}).outputs[0].f, (std::vector<double>{1, 2, 10, 0}));
  EXPECT_EQ(run_op("sdpa", operands, {{"is_causal", true}, {"lower_right", true}}).outputs[0].f, (std::vector<double>{1, 2, 15, 0}));
}

TEST(AttentionOps, DropoutDrawsByTheMappingOfPhilox) {
  const double p = 0.5;
  const auto operands = with({{"f64[1,1,2,1]", {0}}, {"f64[1,1,70,1]", {0}}, {"f64[1,1,70,1]", {1}}}, sdpa_seed, {"i64[2]", {11, 64}});
  const OpRun run = run_op("sdpa", operands, {{"dropout_p", p}});
  for (int64_t i = 0; i < 2; ++i) {
    int kept = 0;
    for (uint64_t j = 0; j < 70; ++j) kept += dropout_keeps(philox_word(11, 64, attention_dropout_row(0, i), j), dropout_threshold(p));
    EXPECT_NEAR(run.outputs[0].f[static_cast<size_t>(i)], kept / 70.0 / (1 - p), 1e-12);
    EXPECT_GT(kept, 10);
    EXPECT_LT(kept, 60);
  }
}

TEST(AttentionOps, DropoutOfEverythingGivesZerosC41) {
  const auto operands = with({{"f32[1,1,2,4]!", {1}}, {"f32[1,1,3,4]!", {1}}, {"f32[1,1,3,4]!", {1}}}, sdpa_seed, {"i64[2]", {1, 0}});
  const OpRun run = run_op("sdpa", operands, {{"dropout_p", 1.0}});
  EXPECT_EQ(run.outputs[0].f, std::vector<double>(8, 0.0));
  for (const auto& grad : gradients(run))
    for (double value : grad.f) EXPECT_EQ(value, 0.0);
}

// The pair that executors claim must have the gradients of the op-by-op form, for every feature at once.
TEST(AttentionOps, BackwardOfThePairAgreesWithTheDecomposition) {
  std::vector<double> lengths{5, 3};
  std::vector<Operand> operands = {{"f64[2,4,5,3]!", random_values(120, 7)},
                                   {"f64[2,2,6,3]!", random_values(72, 8)},
                                   {"f64[2,2,6,2]!", random_values(48, 9)},
                                   {"f64[1,4,5,1]!", random_values(20, 10)},
                                   {"f64[4]!", random_values(4, 11)},
                                   {"f64[4]!", {0.3, 0.1, 0.5, 0.2}},
                                   absent(),
                                   absent(),
                                   {"i32[2]", lengths},
                                   {"i64[2]", {5, 0}}};
  const Attributes attrs{{"lower_right", true}, {"window_left", int64_t{3}}, {"window_right", int64_t{1}}, {"dropout_p", 0.25}, {"softcap", 1.5}};
  Attributes grouped = attrs;
  grouped.set("enable_gqa", true);
  const OpRun pair = run_op("sdpa_forward", operands, attrs), plain = run_op("sdpa", operands, grouped);
  const HostTensor out_grad = testing_ops::host_of(pair.outputs[0].type, random_values(80, 12));
  for (size_t e = 0; e < 80; ++e) EXPECT_NEAR(pair.outputs[0].f[e], plain.outputs[0].f[e], 1e-12);
  // Zero for lse: its gradient is another way through the rule.
  const auto expected = gradients(plain, {out_grad});
  const auto by_lse = gradients(pair, {out_grad, testing_ops::host_of(pair.outputs[1].type, {0.0})});
  OpRun out_alone = pair;
  out_alone.trace.outputs.resize(1);
  const auto by_pair = gradients(out_alone, {out_grad});
  ASSERT_EQ(expected.size(), 6u);
  ASSERT_EQ(by_pair.size(), 6u);
  for (size_t g = 0; g < 6; ++g) {
    EXPECT_EQ(by_pair[g].type.shape, expected[g].type.shape);
    for (size_t e = 0; e < expected[g].f.size(); ++e) {
      EXPECT_NEAR(by_pair[g].f[e], expected[g].f[e], 1e-11) << "gradient " << g << ", element " << e;
      EXPECT_NEAR(by_lse[g].f[e], expected[g].f[e], 1e-11) << "gradient " << g << ", element " << e;
    }
  }
}

TEST(AttentionOps, CallsOfOtherRanksBecomeFourDims) {
  const TensorType q = parse_tensor_spec("bf16[3,2,8,5,16]"), k = parse_tensor_spec("bf16[1,2,1,7,16]"), m = parse_tensor_spec("bool[5,7]");
  const SdpaCall call = sdpa_call_of({&q, &k, &k, &m}, {}, false);
  EXPECT_EQ(call.query.shape, (Dims{6, 8, 5, 16}));
  EXPECT_EQ(call.key.shape, (Dims{6, 1, 7, 16}));
  EXPECT_EQ(call.mask->shape, (Dims{1, 1, 5, 7}));
  EXPECT_DOUBLE_EQ(call.scale, 0.25);
  const TensorType flat = parse_tensor_spec("bf16[5,16]"), keys = parse_tensor_spec("bf16[4,7,16]");
  EXPECT_EQ(sdpa_call_of({&flat, &keys, &keys}, {{"enable_gqa", false}}, false).query.shape, (Dims{1, 4, 5, 16}));
  EXPECT_EQ(sdpa_call_of({&flat, &keys, &keys}, {{"enable_gqa", false}}, false).query.strides[1], 0);
}

TEST(AttentionOps, TypesInOneLayoutStayAsTheyAre) {
  const TensorType q = parse_tensor_spec("bf16[2,4,5,16]{stride=320,16,64,1}"), k = parse_tensor_spec("bf16[2,2,7,16]");
  const SdpaCall call = sdpa_call_of({&q, &k, &k}, {}, true);
  EXPECT_EQ(call.query.strides, q.strides);
  EXPECT_TRUE(call.training);
  EXPECT_TRUE(is_canonical_sdpa({&q, &k, &k}));
  const TensorType wide = parse_tensor_spec("bf16[1,2,7,16]");
  EXPECT_FALSE(is_canonical_sdpa({&q, &wide, &wide}));
}

}  // namespace
}  // namespace fulmen
