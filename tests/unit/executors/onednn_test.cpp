// The oneDNN executor on the op table's convolutions and on larger ones: strided memory with canaries, against the
// reference meaning; the same bits for any thread count; and what is refused.
#include "executors/onednn/onednn.h"

#include <gtest/gtest.h>

#include <cmath>

#include "core/parallel.h"
#include "executors/reference/evaluate.h"
#include "tests/table/sample_call.h"
#include "tests/table/strided_memory.h"

namespace fulmen::onednn {
namespace {

bool is_taken(const std::string& op) {
  return op == "convolution" || op == "convolution_input_grad" || op == "convolution_weight_grad";
}

class OneDnn : public testing::Test {
 protected:
  void SetUp() override {
    if (!executor_->unavailable_reason().empty()) GTEST_SKIP() << executor_->unavailable_reason();
  }
  void TearDown() override { set_thread_count(0); }
  std::shared_ptr<const Executor> executor_ = make_onednn_executor();

  // Runs the call and compares; gives the result.
  HostTensor check(const OpDef& op, const Sample& sample) {
    const Trace trace = table::trace_of(op, sample);
    const auto values = table::values_of(op, sample, trace);
    const auto expected = evaluate(trace, values);
    std::vector<table::StridedMemory> inputs, outputs;
    for (size_t i = 0; i < values.size(); ++i) inputs.emplace_back(trace.type(trace.inputs[i]), &values[i]);
    outputs.emplace_back(trace.type(trace.outputs[0]), nullptr);
    if (!table::run_call(*executor_, trace, Target{}, inputs, outputs)) return {};
    EXPECT_TRUE(outputs[0].canaries_intact());
    for (auto& input : inputs) EXPECT_TRUE(input.unchanged());
    HostTensor found = outputs[0].read();
    double largest = 1.0;
    for (double x : expected[0].f) largest = std::max(largest, std::abs(x));
    const double step = found.type.dtype == DType::bf16 ? 1 / 100.0 : 2e-6;
    for (size_t i = 0; i < found.f.size(); ++i)
      if (std::abs(found.f[i] - expected[0].f[i]) > step * largest) {
        ADD_FAILURE() << "element " << i << " is " << found.f[i] << ", wanted " << expected[0].f[i];
        break;
      }
    return found;
  }
};

TEST_F(OneDnn, EverySampleOfTheTable) {
  int ran = 0;
  for (const table::SampleCall& sample : table::all_sample_calls()) {
    if (!is_taken(sample.op->name)) continue;
    SCOPED_TRACE(sample.id);
    const Trace trace = table::trace_of(*sample.op, *sample.sample);
    const Claim claim = executor_->claim(call_of(trace, trace.nodes[0]), Target{});
    if (const auto* refusal = std::get_if<Refusal>(&claim)) {
      const bool expected = refusal->code == RefusalCode::degenerate || refusal->code == RefusalCode::wrong_dtype ||
                            (refusal->code == RefusalCode::forward_unsupported && trace.type(trace.outputs[0]).dtype == DType::bf16);
      EXPECT_TRUE(expected) << refusal->reason;
      continue;
    }
    check(*sample.op, *sample.sample);
    ++ran;
  }
  EXPECT_GE(ran, 15);
}

const std::vector<std::pair<std::string, Sample>>& larger_calls() {
  static const std::vector<std::pair<std::string, Sample>> calls{
      {"convolution", {"patches", {"f32[11,3,32,32]", "f32[40,3,8,8]", "f32[40]"}, {{"stride", Dims{8}}}}},
      {"convolution", {"wide", {"f32[3,16,14,14]", "f32[32,16,3,3]", "none"}, {{"padding", Dims{1}}}}},
      {"convolution", {"sliced", {"f32[2,3,9,9]{stride=1000,100,10,1}", "f32[4,3,3,3]", "f32[4]"}, {}}},
      {"convolution_input_grad", {"wide", {"f32[9,16,7,7]", "f32[16,8,3,3]"}, {{"input_shape", Dims{9, 8, 14, 14}}, {"stride", Dims{2}}, {"padding", Dims{1}}}}},
      {"convolution_weight_grad", {"wide", {"f32[5,8,14,14]", "f32[5,19,14,14]"}, {{"weight_shape", Dims{19, 8, 3, 3}}, {"padding", Dims{1}}}}},
      {"convolution_weight_grad", {"grouped", {"f32[2,12,10]", "f32[2,24,10]"}, {{"weight_shape", Dims{24, 1, 3}}, {"groups", int64_t{12}}, {"padding", Dims{1}}}}},
  };
  return calls;
}

TEST_F(OneDnn, LargerCallsInPieces) {
  for (const auto& [op, sample] : larger_calls()) {
    SCOPED_TRACE(op + " " + sample.name);
    check(require_op(op), sample);
  }
}

TEST_F(OneDnn, ThreadCountDoesNotChangeBits) {
  for (const auto& [op, sample] : larger_calls()) {
    SCOPED_TRACE(op + " " + sample.name);
    set_thread_count(1);
    const HostTensor one = check(require_op(op), sample);
    set_thread_count(3);
    const HostTensor three = check(require_op(op), sample);
    EXPECT_EQ(one.f, three.f);
  }
}

TEST_F(OneDnn, RefusalsSayWhy) {
  const auto refusal = [&](const std::string& op, const std::vector<std::string>& inputs) {
    const Trace trace = table::trace_of(require_op(op), Sample{.name = "test", .inputs = inputs, .attrs = {}});
    return std::get<Refusal>(executor_->claim(call_of(trace, trace.nodes[0]), Target{}));
  };
  EXPECT_EQ(refusal("convolution", {"f64[1,2,5]", "f64[3,2,3]", "none"}).reason, "convolution: x is f64, onednn takes f32 and bf16");
  EXPECT_EQ(refusal("convolution", {"f32[0,2,5]", "f32[3,2,3]", "none"}).code, RefusalCode::degenerate);
  EXPECT_EQ(refusal("convolution", {"f32[4,2,5]{stride=0,5,1}", "f32[3,2,3]", "none"}).code, RefusalCode::wrong_layout);
  EXPECT_EQ(refusal("relu", {"f32[4]"}).code, RefusalCode::not_implemented);
}

TEST(OneDnnExecutor, SaysWhatItIs) {
  const auto executor = make_onednn_executor();
  EXPECT_EQ(executor->name(), "onednn");
  EXPECT_TRUE(!executor->version().empty() || !executor->unavailable_reason().empty());
}

}  // namespace
}  // namespace fulmen::onednn
