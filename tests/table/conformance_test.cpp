// The conformance suite itself: executors of the default list keep their promises, and one that writes an element too
// far, or claims a pair without its backward, is found out.
#include <gtest/gtest.h>

#include "conformance/check_executor.h"
#include "executors/default_list.h"
#include "ops/table.h"

namespace fulmen::conformance {
namespace {

std::string text_of(const Report& report) {
  std::string text;
  for (const Fault& fault : report.faults) text += fault.call + ": " + fault.promise + ": " + fault.text + "\n";
  return text;
}

class NoFaults : public ::testing::TestWithParam<std::string> {};

TEST_P(NoFaults, OfTheDefaultList) {
  for (const auto& executor : default_executors()) {
    if (executor->name() != GetParam()) continue;
    if (!executor->unavailable_reason().empty()) GTEST_SKIP() << executor->unavailable_reason();
    Report report;
    // One op of each kind, in each layout and dtype; executor_agreement_test has every op as its samples are written.
    for (const char* op : {"add", "where", "gelu", "amax", "cumsum", "index_select", "scatter", "matmul", "linear", "layer_norm", "softmax",
                           "cross_entropy", "convolution", "sdpa", "sdpa_forward"})
      if (const OpDef* found = find_op(op)) report.join(check_op(executor, *found));
    EXPECT_GT(report.claimed, 0);
    EXPECT_TRUE(report.faults.empty()) << text_of(report);
  }
}
INSTANTIATE_TEST_SUITE_P(Conformance, NoFaults, ::testing::Values("cpu", "onednn", "reference"), [](const auto& info) { return info.param; });

// neg of contiguous f32 tensors, right or wrong in the way that it is told.
class Negate final : public Executor {
 public:
  enum Way { right, one_too_far, writes_the_operand, pair_without_backward };
  explicit Negate(Way way) : way_(way) {}

  std::string_view name() const override { return "negate"; }
  std::string_view doc() const override { return "neg, for tests"; }

  Claim claim(const Call& call, const Target&) const override {
    const std::string& op = call.op->name;
    if (way_ == pair_without_backward && op == "sdpa") return Plan{.forward = {"none", 0}};
    if (op != "neg") return Refusal{RefusalCode::not_implemented, op + ": negate runs neg only"};
    const TensorType& x = *call.inputs[0];
    if (x.dtype != DType::f32 || !x.is_contiguous()) return Refusal{RefusalCode::wrong_layout, op + ": negate takes contiguous f32"};
    return Plan{.forward = {"negate", 0}};
  }

  std::unique_ptr<Kernel> make_kernel(const Call& call, const Plan&, const Target&) const override {
    struct Run final : Kernel {
      int64_t count;
      Way way;
      Run(int64_t n, Way w) : count(n), way(w) {}
      void run(const RunContext&, const void* const* inputs, void* const* outputs) const override {
        const auto* x = static_cast<const float*>(inputs[0]);
        auto* y = static_cast<float*>(outputs[0]);
        for (int64_t i = 0; i < count; ++i) y[i] = -x[i];
        if (way == one_too_far) y[count] = 0;
        if (way == writes_the_operand && count > 0) const_cast<float*>(x)[count - 1] = 7;
      }
    };
    return std::make_unique<Run>(call.inputs[0]->element_count(), way_);
  }

 private:
  Way way_;
};

std::string promises_broken(Negate::Way way, const std::string& op) {
  std::string broken;
  for (const Fault& fault : check_op(std::make_shared<Negate>(way), require_op(op)).faults)
    if (broken.find(fault.promise) == std::string::npos) broken += fault.promise + " ";
  return broken;
}

TEST(Conformance, ARightExecutorHasNoFault) {
  const Report report = check_op(std::make_shared<Negate>(Negate::right), require_op("neg"));
  EXPECT_GT(report.claimed, 0);
  EXPECT_GT(report.gradients, 0);
  EXPECT_EQ(text_of(report), "");
}

TEST(Conformance, OneElementTooFarIsFound) { EXPECT_NE(promises_broken(Negate::one_too_far, "neg").find("memory"), std::string::npos); }

TEST(Conformance, AWrittenOperandIsFound) { EXPECT_NE(promises_broken(Negate::writes_the_operand, "neg").find("inputs"), std::string::npos); }

TEST(Conformance, APairWithoutItsBackwardIsFound) { EXPECT_EQ(promises_broken(Negate::pair_without_backward, "sdpa"), "claim "); }

}  // namespace
}  // namespace fulmen::conformance
