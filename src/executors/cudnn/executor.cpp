// The executor of the list: reads the attention call off a node and asks the context.
#include <algorithm>

#include "core/error.h"
#include "executors/cudnn/cudnn.h"
#include "runtime/counters.h"

namespace fulmen::cudnn {

namespace {

bool is_attention(const Call& call) {
  return call.op && (call.op->name == "sdpa" || call.op->name == "sdpa_forward" || call.op->name == "sdpa_backward");
}

SdpaLayouts layouts_of(const Call& call) {
  SdpaLayouts layouts;
  const auto strides = [](const TensorType* type) {
    return type && type->rank() == 4 ? std::optional<Dims>(type->strides) : std::nullopt;
  };
  const auto output = [&](size_t i) { return i < call.outputs.size() ? strides(call.outputs[i]) : std::nullopt; };
  const auto input = [&](size_t i) { return i < call.inputs.size() ? strides(call.inputs[i]) : std::nullopt; };
  if (call.op->name != "sdpa_backward") {
    layouts.out = output(0);
    return layouts;
  }
  layouts.out = input(sdpa_out);
  layouts.out_grad = input(sdpa_out_grad);
  layouts.query_grad = output(0);
  layouts.key_grad = output(1);
  layouts.value_grad = output(2);
  layouts.mask_grad = output(3);
  return layouts;
}

SdpaCall sdpa_of(const Call& call) {
  const bool backward = call.op->name == "sdpa_backward";
  // The statistics a backward reads are a result of sdpa_forward: where they are wanted, it is a training forward.
  const bool keeps_statistics = call.op->name == "sdpa_forward" && call.outputs.size() > 1 && call.outputs[1];
  std::vector<const TensorType*> types(call.inputs.begin(), call.inputs.end());
  types.resize(std::max<size_t>(types.size(), sdpa_operand_count), nullptr);
  SdpaCall sdpa = sdpa_call_of(types, *call.attrs, call.training || backward || keeps_statistics);
  sdpa.deterministic = sdpa.deterministic || call.deterministic;
  if (backward && sdpa.mask) sdpa.mask->requires_grad = call.outputs.size() > 3 && call.outputs[3];
  return sdpa;
}

class NodeKernel : public Kernel {
 public:
  NodeKernel(std::shared_ptr<const SdpaKernel> kernel, const Call& call, double scale)
      : kernel_(std::move(kernel)),
        backward_(call.op->name == "sdpa_backward"),
        inputs_(call.inputs.size()),
        outputs_(call.outputs.size()),
        scale_(scale) {}

  size_t workspace_bytes() const override { return kernel_->workspace_bytes(); }

  void run(const RunContext& context, const void* const* inputs, void* const* outputs) const override {
    const auto input = [&](size_t i) { return i < inputs_ ? inputs[i] : nullptr; };
    const auto output = [&](size_t i) { return i < outputs_ ? outputs[i] : nullptr; };
    SdpaKernel::Forward forward;
    forward.query = input(sdpa_query);
    forward.key = input(sdpa_key);
    forward.value = input(sdpa_value);
    forward.mask = input(sdpa_mask);
    forward.key_lengths = input(sdpa_key_lengths);
    forward.seed = input(sdpa_seed);
    if (!backward_) {
      forward.out = output(0);
      forward.lse = output(1);
      return kernel_->run_forward(context, forward, scale_);
    }
    forward.out = const_cast<void*>(input(sdpa_out));
    forward.lse = const_cast<void*>(input(sdpa_lse));
    kernel_->run_backward(context, {forward, input(sdpa_out_grad), output(0), output(1), output(2), output(3)}, scale_);
  }

 private:
  std::shared_ptr<const SdpaKernel> kernel_;
  bool backward_;
  size_t inputs_, outputs_;
  double scale_;
};

class CudnnExecutor : public Executor, public Counting {
 public:
  explicit CudnnExecutor(std::shared_ptr<const Context> context) : context_(std::move(context)) {}

  std::string_view name() const override { return "cudnn"; }
  std::string_view doc() const override {
    return "scaled dot product attention on CUDA by cuDNN 9, claimed when it accepts forward and backward";
  }
  std::string unavailable_reason() const override { return context_->unavailable_reason(); }
  std::string version() const override { return context_->version(); }

  std::vector<std::pair<std::string, int64_t>> counters() const override {
    const CacheInfo info = context_->cache_info();
    return {{"claims", info.claims},
            {"claim_hits", info.claim_hits},
            {"proofs", info.proofs},
            {"plans", info.plans},
            {"plan_hits", info.plan_hits},
            {"builds_forward", info.builds_forward},
            {"builds_backward", info.builds_backward},
            {"plan_failures", info.plan_failures},
            {"shared", info.shared},
            {"evictions", info.evictions},
            {"store_loads", info.loads_from_store},
            {"store_writes", info.store_writes},
            {"store_damaged", info.store_damaged}};
  }

  Claim claim(const Call& call, const Target& target) const override {
    if (!is_attention(call))
      return Refusal{RefusalCode::not_implemented, (call.op ? call.op->name : std::string("fusion")) +
                                                       ": cudnn runs sdpa here and nothing else"};
    return *context_->claim_sdpa(sdpa_of(call), target, layouts_of(call));
  }

  std::unique_ptr<Kernel> make_kernel(const Call& call, const Plan&, const Target& target) const override {
    // The plan was accepted for the op's own layouts; this node may have others (a gradient that arrives with stride 0).
    // The answer for them is in the cache where they are the same, and a proof of its own where they aren't.
    const SdpaCall sdpa = sdpa_of(call);
    const auto answer = context_->claim_sdpa(sdpa, target, layouts_of(call));
    if (const auto* refusal = std::get_if<Refusal>(answer.get()))
      throw DeviceError("cudnn: claimed, but not in the layouts of this node: " + refusal->reason);
    return std::make_unique<NodeKernel>(context_->kernel(std::get<Plan>(*answer), target), call, sdpa.scale);
  }

 private:
  std::shared_ptr<const Context> context_;
};

}  // namespace

std::shared_ptr<const Executor> make_executor(std::shared_ptr<const Context> context) {
  return std::make_shared<CudnnExecutor>(std::move(context));
}

}  // namespace fulmen::cudnn
