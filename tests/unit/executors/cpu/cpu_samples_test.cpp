// Every sample of the catalogue that the cpu executor claims, on every instruction set, against the evaluator.
#include <gtest/gtest.h>

#include <random>

#include "executors/cpu/cpu.h"
#include "ops/table.h"
#include "tests/unit/executors/cpu/tile_cases.h"

namespace fulmen::cpu {
namespace {

using tile::testing::GuardedBuffer;

HostTensor sample_input(const TensorType& type, const std::string& domain, std::mt19937& generator) {
  if (!is_float(type.dtype)) {
    HostTensor tensor = tile::testing::random_tensor(type, generator, 0, 1);
    if (type.dtype != DType::boolean)
      for (int64_t& x : tensor.i) x = std::uniform_int_distribution<int64_t>(0, 1)(generator);
    return tensor;
  }
  const bool positive = domain == "positive" || domain == "unit" || domain == "nonzero";
  HostTensor tensor = tile::testing::random_tensor(type, generator, positive ? 0.125 : -1.5, positive ? 0.875 : 1.5);
  if (domain == "small_int")
    for (double& x : tensor.f) x = std::round(x * 2);
  return tensor;
}

struct Counts {
  int run = 0, refused = 0;
};

void run_sample(const OpDef& op, const Sample& sample, Counts& counts) {
  Trace trace;
  std::vector<ValueId> operands;
  for (const std::string& spec : sample.inputs) operands.push_back(spec == "none" ? no_value : trace.add_input(parse_tensor_spec(spec)));
  Builder builder(trace);
  trace.outputs = builder.emit(op.name, operands, sample.attrs);
  const Node& node = trace.nodes.back();
  const auto executor = make_cpu_executor();
  const Target target;
  std::mt19937 generator(11);
  std::vector<HostTensor> inputs;
  std::vector<GuardedBuffer> memory;
  for (ValueId id : trace.inputs) {
    inputs.push_back(sample_input(trace.type(id), sample.domain, generator));
    memory.emplace_back(trace.type(id));
    reference::store(inputs.back(), trace.type(id), memory.back().data());
    inputs.back() = reference::load(trace.type(id), memory.back().data());
  }
  std::vector<const void*> pointers;
  size_t next = 0;
  for (ValueId id : operands) pointers.push_back(id == no_value ? nullptr : memory[next++].data());
  for (Isa isa : available_isas()) {
    if (isa > Isa::avx512) continue;
    force_isa(isa);
    const Call call = call_of(trace, node);
    const Claim claim = executor->claim(call, target);
    if (!is_claimed(claim)) {
      ++counts.refused;
      EXPECT_EQ(std::get<Refusal>(claim).reason.rfind(op.name, 0), 0u) << std::get<Refusal>(claim).reason;
      break;
    }
    const auto kernel = executor->make_kernel(call, std::get<Plan>(claim), target);
    std::vector<GuardedBuffer> outputs;
    std::vector<void*> output_pointers;
    for (ValueId id : trace.outputs) outputs.emplace_back(trace.type(id));
    for (GuardedBuffer& buffer : outputs) output_pointers.push_back(buffer.data());
    GuardedBuffer workspace(contiguous_type(DType::u8, {static_cast<int64_t>(kernel->workspace_bytes())}));
    RunContext context;
    context.workspace = workspace.data();
    kernel->run(context, pointers.data(), output_pointers.data());
    EXPECT_TRUE(workspace.is_intact());
    tile::testing::check_outputs(trace, inputs, outputs, {1e-5, 1e-5});
    ++counts.run;
  }
  force_isa(available_isas().front());
}

TEST(CpuExecutor, EverySampleThatItClaims) {
  Counts counts;
  for (const OpDef* op : all_ops()) {
    // Attention, products and convolutions have tests of their own.
    if (op->name.rfind("sdpa", 0) == 0 || op->name == "fusion") continue;
    for (const Sample& sample : op->samples.good) {
      SCOPED_TRACE(op->name + "/" + sample.name);
      run_sample(*op, sample, counts);
    }
  }
  EXPECT_GT(counts.run, 1000);
}

}  // namespace
}  // namespace fulmen::cpu
