// Losses: what counts in a mean, ignored rows, errors; and that long rows never get a one-hot tensor.
#include <gtest/gtest.h>

#include <cmath>

#include "core/error.h"
#include "ops/table.h"
#include "tests/unit/ops/evaluated.h"

namespace fulmen {
namespace {

using testing_ops::gradients;
using testing_ops::host_of;
using testing_ops::OpRun;
using testing_ops::run_op;

TEST(LossOps, IgnoredRowsCountNothing) {
  // Row 0: logits 0, 0 -> log 2. Row 1 is ignored.
  const OpRun run = run_op("cross_entropy", {{"f64[2,2]!", {0, 0, 5, 1}}, {"i64[2]", {1, -100}}});
  EXPECT_NEAR(run.outputs[0].f[0], std::log(2.0), 1e-12);
  const auto grad = gradients(run, {host_of(run.outputs[0].type, {1.0}), host_of(run.outputs[1].type, {0.0})})[0].f;
  EXPECT_NEAR(grad[0], 0.5, 1e-12);
  EXPECT_NEAR(grad[1], -0.5, 1e-12);
  EXPECT_EQ(grad[2], 0.0);
  EXPECT_EQ(grad[3], 0.0);
}

TEST(LossOps, MeanOfNoRowsIsNan) {
  EXPECT_TRUE(std::isnan(run_op("cross_entropy", {{"f64[2,2]", {0}}, {"i64[2]", {-100, -100}}}).outputs[0].f[0]));
  EXPECT_EQ(run_op("cross_entropy", {{"f64[2,2]", {0}}, {"i64[2]", {-100, -100}}}, {{"reduction", std::string("sum")}}).outputs[0].f[0], 0.0);
}

TEST(LossOps, MeanDividesByTheWeights) {
  // Losses log 2 with weights 1 and 3: (1 + 3) log 2 / (1 + 3).
  const OpRun run = run_op("cross_entropy", {{"f64[2,2]", {0}}, {"i64[2]", {0, 1}}, {"f64[2]", {1, 3}}});
  EXPECT_NEAR(run.outputs[0].f[0], std::log(2.0), 1e-12);
}

TEST(LossOps, SecondResultIsTheLogSumExp) {
  const OpRun run = run_op("cross_entropy", {{"f32[2,2]", {0, 0, 1, 1}}, {"i64[2]", {0, 1}}});
  EXPECT_NEAR(run.outputs[1].f[0], std::log(2.0), 1e-12);
  EXPECT_NEAR(run.outputs[1].f[1], 1 + std::log(2.0), 1e-12);
}

TEST(LossOps, IndexOutsideTheClassesIsAnError) {
  EXPECT_THROW(run_op("cross_entropy", {{"f32[2,2]", {0}}, {"i64[2]", {0, 2}}}), Error);
}

TEST(LossOps, WeightWithGradientIsRefused) {
  const OpRun run = run_op("cross_entropy", {{"f32[2,2]!", {0}}, {"i64[2]", {0, 1}}, {"f32[2]!", {1}}});
  EXPECT_THROW(gradients(run), UnsupportedError);
}

TEST(LossOps, GradientReusesTheLogSumExp) {
  // One pass over the row in the backward: no maximum and no sum over the classes of exponentials again.
  const OpRun run = run_op("cross_entropy", {{"f32[3,1000]!", {0}}, {"i64[3]", {0, 1, 2}}});
  const Trace parts = decompose(differentiate(run.trace).trace, [](const Trace&, const Node& node) { return node.op->name == "cross_entropy"; });
  for (const Node& node : parts.nodes) EXPECT_NE(node.op->name, "amax");
}

TEST(LossOps, TargetOfZeroContributesNothingToTheDivergence) {
  const OpRun run = run_op("kl_div", {{"f64[2]!", {-1, -2}}, {"f64[2]", {0, 1}}}, {{"reduction", std::string("sum")}});
  EXPECT_DOUBLE_EQ(run.outputs[0].f[0], 2.0);
  EXPECT_EQ(gradients(run)[0].f, (std::vector<double>{0, -1}));
}

TEST(ConvolutionOps, AdjointsAreEachOthersGradients) {
  // <conv(x, w), g> = <x, input_grad(g, w)> = <w, weight_grad(x, g)>
  const std::vector<double> x{1, 2, -1, 3, 0, 2, 1, -2, 4, 1}, w{1, -1, 2, 0.5, 1, 3}, g{1, 2, 3, -1, 1, 2};
  const auto dot = [](const std::vector<double>& a, const std::vector<double>& b) {
    double total = 0;
    for (size_t i = 0; i < a.size(); ++i) total += a[i] * b.at(i);
    return total;
  };
  const double y = dot(run_op("convolution", {{"f64[1,2,5]", x}, {"f64[2,1,3]", w}}, {{"groups", int64_t{2}}}).outputs[0].f, g);
  EXPECT_DOUBLE_EQ(y, dot(x, run_op("convolution_input_grad", {{"f64[1,2,3]", g}, {"f64[2,1,3]", w}}, {{"groups", int64_t{2}}, {"input_shape", Dims{1, 2, 5}}}).outputs[0].f));
  EXPECT_DOUBLE_EQ(y, dot(w, run_op("convolution_weight_grad", {{"f64[1,2,5]", x}, {"f64[1,2,3]", g}}, {{"groups", int64_t{2}}, {"weight_shape", Dims{2, 1, 3}}}).outputs[0].f));
}

}  // namespace
}  // namespace fulmen
