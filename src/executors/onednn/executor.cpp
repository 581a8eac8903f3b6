#include "executors/onednn/onednn.h"

#include "core/error.h"
#if !defined(FULMEN_WITHOUT_ONEDNN_REASON)
#include "executors/onednn/convolution.h"
#include "executors/onednn/library.h"
#endif

namespace fulmen::onednn {
namespace {

class OneDnn final : public Executor {
 public:
  std::string_view name() const override { return "onednn"; }
  std::string_view doc() const override { return "convolutions on the CPU by oneDNN"; }

#if defined(FULMEN_WITHOUT_ONEDNN_REASON)
  std::string unavailable_reason() const override { return FULMEN_WITHOUT_ONEDNN_REASON; }
  Claim claim(const Call& call, const Target&) const override {
    return Refusal{RefusalCode::unavailable, call.op->name + ": onednn: " + unavailable_reason()};
  }
  std::unique_ptr<Kernel> make_kernel(const Call&, const Plan&, const Target&) const override {
    throw DeviceError("onednn: " + unavailable_reason());
  }
#else
  std::string unavailable_reason() const override { return library().unavailable_reason; }
  std::string version() const override { return library().version; }
  Claim claim(const Call& call, const Target& target) const override {
    if (target.kind != DeviceKind::cpu)
      return Refusal{RefusalCode::wrong_device, call.op->name + ": the target is " + target.name + ", onednn runs on the CPU"};
    if (!is_convolution(call)) return Refusal{RefusalCode::not_implemented, call.op->name + ": onednn runs convolutions only"};
    return claim_convolution(call);
  }
  std::unique_ptr<Kernel> make_kernel(const Call&, const Plan& plan, const Target&) const override { return make_convolution_kernel(plan); }
#endif
};

}  // namespace

std::shared_ptr<const Executor> make_onednn_executor() { return std::make_shared<const OneDnn>(); }

}  // namespace fulmen::onednn
