// The executor as the list sees it: nodes of the attention ops, for a described device.
#include <gtest/gtest.h>

#include <filesystem>

#include "claiming/targets.h"
#include "core/error.h"
#include "executors/cudnn/cudnn.h"
#include "ops/builder.h"

namespace fulmen::cudnn {
namespace {

std::shared_ptr<const Context> shared_context() {
  static const auto context = [] {
    Options options = options_from_environment();
    options.plan_store = false;
    for (const char* python : {"python3.10", "python3.11", "python3.12", "python3.13"})
      options.search_folders.push_back(std::string(FULMEN_SOURCE_DIR) + "/.venv/lib/" + python +
                                       "/site-packages/nvidia/cudnn/lib");
    return std::make_shared<const Context>(options);
  }();
  return context;
}

ValueId input(Trace& trace, const char* spec) {
  TensorType type = parse_tensor_spec(spec);
  type.device = {DeviceKind::cuda, 0};
  return trace.add_input(type);
}

TEST(CudnnExecutor, ClaimsAttentionAndNothingElse) {
  const auto executor = make_executor(shared_context());
  if (!executor->unavailable_reason().empty()) GTEST_SKIP() << executor->unavailable_reason();
  EXPECT_EQ(executor->name(), "cudnn");
  EXPECT_NE(executor->version().find("headers"), std::string::npos) << executor->version();
  const Target target = find_target("h200");
  Trace trace;
  Builder b(trace);
  const ValueId q = input(trace, "bf16[2,8,256,64]!"), k = input(trace, "bf16[2,2,256,64]!"),
                v = input(trace, "bf16[2,2,256,64]!");
  std::vector<ValueId> operands(sdpa_operand_count, no_value);
  operands[sdpa_query] = q, operands[sdpa_key] = k, operands[sdpa_value] = v;
  b.emit("sdpa", operands, {{"is_causal", true}, {"enable_gqa", true}});
  b.add(q, q);
  const Claim training = executor->claim(call_of(trace, trace.nodes[0], true), target);
  ASSERT_TRUE(is_claimed(training)) << std::get<Refusal>(training).reason;
  EXPECT_TRUE(std::get<Plan>(training).backward);
  const Claim inference = executor->claim(call_of(trace, trace.nodes[0], false), target);
  ASSERT_TRUE(is_claimed(inference));
  EXPECT_FALSE(std::get<Plan>(inference).backward);
  const Claim other = executor->claim(call_of(trace, trace.nodes[1], true), target);
  EXPECT_EQ(std::get<Refusal>(other).code, RefusalCode::not_implemented);
  // A described device can be asked, not run.
  EXPECT_THROW(executor->make_kernel(call_of(trace, trace.nodes[0], true), std::get<Plan>(training), target), DeviceError);
}

TEST(CudnnExecutor, ACpuCallIsRefusedBeforeTheLibrary) {
  const auto executor = make_executor(std::make_shared<const Context>(Options{}));
  Trace trace;
  Builder b(trace);
  std::vector<ValueId> operands(sdpa_operand_count, no_value);
  for (int i : {sdpa_query, sdpa_key, sdpa_value})
    operands[static_cast<size_t>(i)] = trace.add_input(parse_tensor_spec("bf16[2,4,64,64]"));
  b.emit("sdpa", operands, {});
  const Claim claim = executor->claim(call_of(trace, trace.nodes[0], true), cpu_target());
  ASSERT_FALSE(is_claimed(claim));
  EXPECT_EQ(std::get<Refusal>(claim).code, RefusalCode::wrong_device);
}

}  // namespace
}  // namespace fulmen::cudnn
