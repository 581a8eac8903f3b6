// What cudnn.h offers where Fulmen was built without the vendor's headers: the cheap rules still speak, everything else
// is unavailable with the reason.
#include <atomic>

#include "core/error.h"
#include "executors/cudnn/cudnn.h"
#include "executors/cudnn/rules.h"

namespace fulmen::cudnn {

struct Context::State {
  std::atomic<int64_t> claims{0};
};

Context::Context(Options) : state_(std::make_unique<State>()) {}
Context::~Context() = default;

std::string build_reason() { return FULMEN_WITHOUT_CUDNN_REASON; }
std::string Context::unavailable_reason() const { return "cudnn: " + build_reason(); }
std::string Context::version() const { return "none, " + build_reason(); }
int Context::library_version() const { return 0; }

std::shared_ptr<const Claim> Context::claim_sdpa(const SdpaCall& call, const Target& target, const SdpaLayouts&,
                                                 const void*) const {
  ++state_->claims;
  return std::make_shared<const Claim>(claim_forward_only(call, target));
}

Claim Context::claim_forward_only(const SdpaCall& call, const Target& target) const {
  if (auto refusal = apply_rules(call, target)) return std::move(*refusal);
  return Refusal{RefusalCode::unavailable, "sdpa: cudnn: " + build_reason()};
}

std::shared_ptr<const SdpaKernel> Context::kernel(const Plan&, const Target&) const {
  throw DeviceError("cudnn: " + build_reason());
}

void Context::revoke(const SdpaCall&, const Target&, const SdpaLayouts&, const std::string&) const {}

CacheInfo Context::cache_info() const {
  CacheInfo info;
  info.claims = state_->claims;
  return info;
}

void Context::clear_caches() const {}

}  // namespace fulmen::cudnn
