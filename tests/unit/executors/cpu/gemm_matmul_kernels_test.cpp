// The matrix product ops through claim_matmul and make_matmul_kernel, on the samples of the op table: strided memory
// with canaries, against the reference meaning; and what is refused.
#include "executors/cpu/gemm/matmul_kernels.h"

#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "executors/cpu/dispatch.h"
#include "executors/reference/evaluate.h"
#include "tests/table/sample_call.h"
#include "tests/table/strided_memory.h"

namespace fulmen::cpu {
namespace {

class Products final : public Executor {
 public:
  std::string_view name() const override { return "products"; }
  std::string_view doc() const override { return "the cpu executor's matrix products alone"; }
  Claim claim(const Call& call, const Target&) const override { return claim_matmul(call); }
  std::unique_ptr<Kernel> make_kernel(const Call& call, const Plan&, const Target&) const override { return make_matmul_kernel(call); }
};

bool is_product(const std::string& op) {
  static const std::set<std::string> names{"matmul", "bmm", "dot", "linear", "addmm", "baddbmm"};
  return names.contains(op);
}

double step_of(DType dtype) { return dtype == DType::bf16 ? 1 / 128.0 : dtype == DType::f16 ? 1 / 1024.0 : 1e-6; }

TEST(GemmMatmulKernels, EverySampleOfTheTable) {
  int ran = 0;
  const Isa before = chosen_isa();
  for (Isa isa : available_isas()) {
    force_isa(isa);
    for (const table::SampleCall& sample : table::all_sample_calls()) {
      if (!is_product(sample.op->name)) continue;
      SCOPED_TRACE(sample.id + " on " + std::string(isa_name(isa)));
      const Trace trace = table::trace_of(*sample.op, *sample.sample);
      const Call call = call_of(trace, trace.nodes[0]);
      const bool takes = gemm_takes(call.outputs[0]->dtype);
      ASSERT_EQ(is_claimed(claim_matmul(call)), takes);
      if (!takes) continue;
      const auto values = table::values_of(*sample.op, *sample.sample, trace);
      const auto expected = evaluate(trace, values);
      std::vector<table::StridedMemory> inputs, outputs;
      for (size_t i = 0; i < values.size(); ++i) inputs.emplace_back(trace.type(trace.inputs[i]), &values[i]);
      outputs.emplace_back(trace.type(trace.outputs[0]), nullptr);
      ASSERT_TRUE(table::run_call(Products(), trace, Target{}, inputs, outputs));
      EXPECT_TRUE(outputs[0].canaries_intact());
      const HostTensor found = outputs[0].read();
      ASSERT_EQ(found.f.size(), expected[0].f.size());
      for (size_t i = 0; i < found.f.size(); ++i)
        ASSERT_NEAR(found.f[i], expected[0].f[i], step_of(found.type.dtype) * (2 + std::abs(expected[0].f[i]))) << "element " << i;
      ++ran;
    }
  }
  force_isa(before);
  EXPECT_GT(ran, 30);
}

Claim claim_of(const std::string& op, const std::vector<std::string>& inputs) {
  const Sample sample{.name = "test", .inputs = inputs, .attrs = {}};
  const Trace trace = table::trace_of(require_op(op), sample);
  return claim_matmul(call_of(trace, trace.nodes[0]));
}

TEST(GemmMatmulKernels, RefusalsSayWhy) {
  const auto refusal = [](const Claim& claim) { return std::get<Refusal>(claim); };
  EXPECT_EQ(refusal(claim_of("matmul", {"f64[2,3]", "f64[3,4]"})).code, RefusalCode::wrong_dtype);
  EXPECT_EQ(refusal(claim_of("matmul", {"i32[2,3]", "i32[3,4]"})).reason, "matmul: a is i32, the cpu product takes f32, bf16 and f16");
  EXPECT_EQ(refusal(claim_of("relu", {"f32[2,3]"})).code, RefusalCode::not_implemented);
  // Dims that are kept apart by gaps, on five levels.
  const std::string uneven = "f32[2,2,2,2,2,3,3]{stride=10000,3000,1000,300,100,3,1}";
  EXPECT_EQ(refusal(claim_of("matmul", {uneven, "f32[2,2,2,2,2,3,3]"})).code, RefusalCode::wrong_layout);
  EXPECT_TRUE(is_claimed(claim_of("matmul", {"f32[2,2,2,2,2,3,3]", "f32[2,2,2,2,2,3,3]"})));
}

TEST(GemmMatmulKernels, ASharedWeightMakesOneProductOfAllRows) {
  const Sample sample{.name = "test", .inputs = {"f32[4,8,16]", "f32[24,16]", "f32[24]"}, .attrs = {}};
  const Trace trace = table::trace_of(require_op("linear"), sample);
  const auto problem = std::get<MatmulProblem>(matmul_problem(call_of(trace, trace.nodes[0])));
  EXPECT_EQ(problem.problem.n, 24);
  EXPECT_EQ(problem.problem.k, 16);
  EXPECT_EQ(problem.bias, 2);
  EXPECT_EQ(problem.problem.b.row_stride, 1) << "the weight is read transposed where it lies";
}

}  // namespace
}  // namespace fulmen::cpu
