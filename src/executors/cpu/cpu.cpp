#include "executors/cpu/cpu.h"

#include "executors/cpu/attention/attention.h"
#include "executors/cpu/dispatch.h"
#include "executors/cpu/gemm/matmul_kernels.h"
#include "executors/cpu/loss/cross_entropy.h"
#include "executors/cpu/moving/moving.h"
#include "executors/cpu/tile/fusion.h"

namespace fulmen::cpu {
namespace {

bool is_attention(const std::string& op) { return op == "sdpa" || op == "sdpa_forward" || op == "sdpa_backward"; }

bool is_loss(const std::string& op) { return op == "cross_entropy" || op == "cross_entropy_grad"; }

bool is_matmul(const std::string& op) {
  for (const char* name : {"matmul", "bmm", "dot", "linear", "addmm", "baddbmm"})
    if (op == name) return true;
  return false;
}

SdpaCall attention_call(const Call& call) {
  SdpaCall sdpa = sdpa_call_of(call.inputs, *call.attrs, call.training || call.op->name == "sdpa_backward");
  sdpa.deterministic = call.deterministic;
  return sdpa;
}

Claim claim_attention(const Call& call) {
  if (!is_canonical_sdpa(call.inputs))
    return Refusal{RefusalCode::wrong_shape, "sdpa: query is " + to_string(call.inputs[sdpa_query]->shape) + ", key is " +
                                                 to_string(call.inputs[sdpa_key]->shape) +
                                                 "; the cpu kernels need four dims with one batch size, as the decomposition makes them"};
  if (auto refusal = attention_refusal(attention_call(call))) return *refusal;
  Plan plan;
  plan.forward.kernel = call.op->name == "sdpa_backward" ? "attention_backward" : "attention_forward";
  if (call.training && call.op->name == "sdpa") plan.backward = PlanDirection{"attention_backward", 0};
  return plan;
}

std::unique_ptr<Kernel> make_attention_kernel(const Call& call) {
  const SdpaCall sdpa = attention_call(call);
  if (call.op->name != "sdpa_backward")
    return make_attention_forward(sdpa, *call.outputs[0], call.outputs.size() > 1 ? call.outputs[1] : nullptr);
  SdpaGradientTypes gradients{};
  const Dims& needs = call.attrs->get_dims("needs");
  for (size_t i = 0; i < gradients.size() && i < call.outputs.size(); ++i)
    if (needs.at(i)) gradients[i] = call.outputs[i];
  return make_attention_backward(sdpa, *call.inputs[sdpa_out], *call.inputs[sdpa_out_grad], gradients);
}

class CpuExecutor final : public Executor {
 public:
  std::string_view name() const override { return "cpu"; }
  std::string_view doc() const override {
    return "SIMD kernels for this machine's CPU: fused pointwise chains and reductions, matrix products, attention";
  }
  std::string version() const override { return std::string(isa_name(chosen_isa())); }

  Claim claim(const Call& call, const Target& target) const override {
    const std::string& op = call.op->name;
    if (target.kind != DeviceKind::cpu) return Refusal{RefusalCode::wrong_device, op + ": the target is " + target.name + ", cpu needs a CPU"};
    for (const TensorType* type : call.inputs)
      if (type && type->device.kind != DeviceKind::cpu)
        return Refusal{RefusalCode::wrong_device, op + ": an operand is on " + to_string(type->device) + ", cpu needs tensors of the CPU"};
    if (is_matmul(op)) return claim_matmul(call);
    if (is_attention(op)) return claim_attention(call);
    if (is_loss(op)) return claim_cross_entropy(call);
    if (is_moving_op(call)) return claim_moving(call);
    return claim_tile_program(call);
  }

  bool can_fuse(const Call& call, const Target& target) const override { return target.kind == DeviceKind::cpu && is_tile_op(call); }

  std::unique_ptr<Kernel> make_kernel(const Call& call, const Plan& plan, const Target&) const override {
    if (is_matmul(call.op->name)) return make_matmul_kernel(call);
    if (is_attention(call.op->name)) return make_attention_kernel(call);
    if (is_loss(call.op->name)) return make_cross_entropy_kernel(call);
    if (is_moving_op(call)) return make_moving_kernel(call);
    return make_tile_kernel(plan);
  }
};

}  // namespace

std::shared_ptr<const Executor> make_cpu_executor() { return std::make_shared<CpuExecutor>(); }

}  // namespace fulmen::cpu
