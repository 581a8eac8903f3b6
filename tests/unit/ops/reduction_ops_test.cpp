// Reductions, running products, norms and matrix products where a plain sample would not show a fault: NaN, ties, zeros,
// empty lines, shared rows.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "core/error.h"
#include "tests/unit/ops/evaluated.h"

namespace fulmen {
namespace {

using testing_ops::gradients;
using testing_ops::OpRun;
using testing_ops::run_op;

constexpr double infinity = std::numeric_limits<double>::infinity();
const double nan = std::nan("");

TEST(ReductionOps, NanIsTheExtremeOfItsLine) {
  const OpRun run = run_op("amax", {{"f32[2,3]", {1, nan, 5, 1, 2, 3}}}, {{"dims", Dims{1}}});
  EXPECT_TRUE(std::isnan(run.outputs[0].f[0]));
  EXPECT_EQ(run.outputs[0].f[1], 3.0);
  EXPECT_TRUE(std::isnan(run_op("amin", {{"f32[3]", {1, nan, 5}}}).outputs[0].f[0]));
}

TEST(ReductionOps, TiesShareTheGradient) {
  const OpRun run = run_op("amax", {{"f64[4]!", {3, 1, 3, 2}}});
  EXPECT_EQ(gradients(run)[0].f, (std::vector<double>{0.5, 0, 0.5, 0}));
}

TEST(ReductionOps, ProductsDifferentiateAcrossZeros) {
  const OpRun one = run_op("prod", {{"f64[3]!", {2, 0, 5}}});
  EXPECT_EQ(gradients(one)[0].f, (std::vector<double>{0, 10, 0}));
  const OpRun two = run_op("prod", {{"f64[3]!", {0, 0, 5}}});
  EXPECT_EQ(gradients(two)[0].f, (std::vector<double>{0, 0, 0}));
  // Running products 2, 0, 0: d/dx = (1 + 0 + 0, 2 + 2 * 5, 0).
  const OpRun running = run_op("cumprod", {{"f64[3]!", {2, 0, 5}}}, {{"dim", int64_t{0}}});
  EXPECT_EQ(gradients(running)[0].f, (std::vector<double>{1, 12, 0}));
}

TEST(ReductionOps, IntegersSumIn64Bits) {
  const OpRun run = run_op("sum", {{"i32[3]", {2147483647, 2147483647, 1}}});
  EXPECT_EQ(run.outputs[0].type.dtype, DType::i64);
  EXPECT_EQ(run.outputs[0].i[0], 4294967295);
  EXPECT_EQ(run_op("sum", {{"bool[3]", {1, 0, 1}}}).outputs[0].i[0], 2);
}

TEST(ReductionOps, EmptyLinesHaveTheirNeutralElement) {
  const Attributes last{{"dims", Dims{1}}};
  EXPECT_EQ(run_op("sum", {{"f32[2,0]", {0}}}, last).outputs[0].f, (std::vector<double>{0, 0}));
  EXPECT_EQ(run_op("prod", {{"f32[2,0]", {0}}}, last).outputs[0].f, (std::vector<double>{1, 1}));
  EXPECT_EQ(run_op("logsumexp", {{"f32[2,0]", {0}}}, last).outputs[0].f, (std::vector<double>{-infinity, -infinity}));
  EXPECT_TRUE(std::isnan(run_op("mean", {{"f32[2,0]", {0}}}, last).outputs[0].f[0]));
  EXPECT_EQ(run_op("all", {{"bool[2,0]", {0}}}, last).outputs[0].i, (std::vector<int64_t>{1, 1}));
}

TEST(ReductionOps, LogSumExpOfClosedLinesHasNoGradient) {
  const OpRun run = run_op("logsumexp", {{"f64[2,2]!", {-infinity, -infinity, 0, 0}}}, {{"dims", Dims{1}}});
  EXPECT_EQ(run.outputs[0].f[0], -infinity);
  EXPECT_EQ(gradients(run)[0].f, (std::vector<double>{0, 0, 0.5, 0.5}));
}

TEST(ReductionOps, DeviationOfEqualElementsHasZeroGradient) {
  const OpRun run = run_op("std", {{"f64[3]!", {2, 2, 2}}});
  EXPECT_EQ(gradients(run)[0].f, (std::vector<double>{0, 0, 0}));
  const OpRun norm = run_op("norm", {{"f64[3]!", {0, 0, 0}}});
  EXPECT_EQ(gradients(norm)[0].f, (std::vector<double>{0, 0, 0}));
}

TEST(MatmulOps, WeightGradientOfLinearIsOneProductOverAllRows) {
  const OpRun run = run_op("linear", {{"f32[4,5,3]!", {1}}, {"f32[2,3]!", {1}}, {"f32[2]!", {1}}});
  const JointTrace joint = differentiate(run.trace);
  int products = 0;
  for (const Node& node : joint.trace.nodes)
    if (node.op->name == "matmul") {
      ++products;
      EXPECT_EQ(joint.trace.type(node.inputs[0]).rank(), 2);
      EXPECT_EQ(joint.trace.type(node.inputs[1]).rank(), 2);
    }
  EXPECT_EQ(products, 2);
}

TEST(MatmulOps, BetaZeroIgnoresTheInput) {
  const OpRun run = run_op("addmm", {{"f32[2]", {nan}}, {"f32[1,2]", {1, 2}}, {"f32[2,2]", {1, 0, 0, 1}}}, {{"beta", 0.0}});
  EXPECT_EQ(run.outputs[0].f, (std::vector<double>{1, 2}));
}

TEST(MatmulOps, EinsumTakesDiagonalsAndBroadcasts) {
  const OpRun trace = run_op("einsum", {{"f64[2,2]!", {1, 2, 3, 4}}}, {{"equation", std::string("ii->")}});
  EXPECT_EQ(trace.outputs[0].f[0], 5.0);
  EXPECT_EQ(gradients(trace)[0].f, (std::vector<double>{1, 0, 0, 1}));
  const OpRun wide = run_op("einsum", {{"f64[1,2]", {1, 2}}, {"f64[3,2]", {1, 0, 0, 1, 1, 1}}}, {{"equation", std::string("bi,bi->b")}});
  EXPECT_EQ(wide.outputs[0].f, (std::vector<double>{1, 2, 3}));
}

TEST(NormOps, RunningStatisticsFollowTheMomentum) {
  const OpRun run = run_op("batch_norm", {{"f64[2,1]", {1, 3}}, {}, {}, {"f64[1]", {10}}, {"f64[1]", {4}}}, {{"training", true}, {"momentum", 0.5}, {"eps", 0.0}});
  EXPECT_EQ(run.outputs[0].f, (std::vector<double>{-1, 1}));
  EXPECT_EQ(run.outputs[1].f[0], 6.0);  // (10 + 2) / 2
  EXPECT_EQ(run.outputs[2].f[0], 3.0);  // (4 + 2) / 2, unbiased
}

TEST(EmbeddingOps, PaddingRowGetsNoGradient) {
  const OpRun run = run_op("embedding", {{"f32[3,2]!", {1, 2, 3, 4, 5, 6}}, {"i64[4]", {2, 1, 2, 1}}}, {{"padding_idx", int64_t{-1}}});
  EXPECT_EQ(run.outputs[0].f, (std::vector<double>{5, 6, 3, 4, 5, 6, 3, 4}));
  EXPECT_EQ(gradients(run)[0].f, (std::vector<double>{0, 0, 2, 2, 0, 0}));
}

TEST(EmbeddingOps, IndexOutsideTheTableIsAnError) {
  try {
    run_op("embedding", {{"f32[3,2]", {0}}, {"i64[2]", {1, 3}}});
    FAIL() << "no error";
  } catch (const ShapeError& error) {
    EXPECT_EQ(std::string(error.what()), "embedding: index has 3 at element 1, the table has 3 rows; needed 0 to 2");
  }
}

}  // namespace
}  // namespace fulmen
