// The claim of one call: cache, rules, availability, known faults, the library's word, and on a GPU at hand the built
// plans. See cudnn.h for the order and the reasons.
#include <atomic>
#include <deque>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>

#include "core/error.h"
#include "executors/cudnn/cudnn.h"
#include "executors/cudnn/graph.h"
#include "executors/cudnn/library.h"
#include "executors/cudnn/proof.h"
#include "executors/cudnn/rules.h"

namespace fulmen::cudnn {

namespace {

struct WordsHash {
  size_t operator()(const std::vector<int64_t>& words) const { return hash_words(words); }
};

void append_target(std::vector<int64_t>& words, const Target& target) {
  words.push_back(static_cast<int64_t>(target.kind) | target.described << 8 |
                  static_cast<int64_t>(target.device_index) << 16 |
                  static_cast<int64_t>(target.compute_capability) << 32);
  // A GPU at hand is its index; a description is its text.
  if (target.described) words.push_back(static_cast<int64_t>(std::hash<std::string>{}(target.description)));
}

}  // namespace

struct Context::State {
  Options options;
  mutable std::shared_mutex mutex;
  std::unordered_map<std::vector<int64_t>, std::shared_ptr<const Claim>, WordsHash> answers;
  std::deque<const std::vector<int64_t>*> order;  // of arrival; keys of `answers`
  std::mutex asking;  // one question at a time: the library's answers are rare and the order of its warnings clear
  std::atomic<int64_t> claims{0}, claim_hits{0}, proofs{0}, evictions{0};

  const Library& library() const {
    const Library& opened = open_library(options);
    use_library(opened.handle);
    return opened;
  }

  std::shared_ptr<const Claim> find(const std::vector<int64_t>& words) {
    std::shared_lock lock(mutex);
    const auto at = answers.find(words);
    return at == answers.end() ? nullptr : at->second;
  }

  void keep(const std::vector<int64_t>& words, std::shared_ptr<const Claim> claim) {
    std::unique_lock lock(mutex);
    const auto [at, added] = answers.insert_or_assign(words, std::move(claim));
    if (added) order.push_back(&at->first);
    while (answers.size() > options.claim_limit) {
      const std::vector<int64_t> oldest = *order.front();
      order.pop_front();
      answers.erase(oldest);
      ++evictions;
    }
  }

  Claim ask(const SdpaCall& call, const Target& target, const SdpaLayouts& layouts, bool forward_only);
};

Context::Context(Options options) : state_(std::make_unique<State>()) { state_->options = std::move(options); }
Context::~Context() = default;

std::string Context::unavailable_reason() const { return state_->library().problem; }

int Context::library_version() const {
  const Library& library = state_->library();
  return library.handle ? library.version : 0;
}

std::string Context::version() const {
  const Library& library = state_->library();
  if (!library.handle) return "not usable, " + headers_text();
  return version_text(library.version) + " (" + library.path + ", " + library.found + "), " + headers_text();
}

Claim Context::State::ask(const SdpaCall& call, const Target& target, const SdpaLayouts& layouts, bool forward_only) {
  if (auto refusal = apply_rules(call, target)) return std::move(*refusal);
  const Library& opened = library();
  if (!opened.handle) return Refusal{RefusalCode::unavailable, "sdpa: " + opened.problem};
  if (!target.described)
    return Refusal{RefusalCode::unavailable, "sdpa: cudnn answers for described targets only in this version"};
  if (const std::string& driver = ensure_driver_library(); driver.starts_with("no"))
    return Refusal{RefusalCode::prerequisite_missing, "sdpa: cudnn can't be asked, there is " + driver};
  const Side side{nullptr, target.description, target.compute_capability};
  ProofOptions proof_options{opened.version, target.name, options.workspace_limit_bytes, forward_only};
  int asked = 0;
  std::lock_guard lock(asking);
  std::variant<Proof, Refusal> outcome = prove(problem_of(call, layouts), side, proof_options, asked);
  proofs += asked;
  if (auto* refusal = std::get_if<Refusal>(&outcome)) return std::move(*refusal);
  Proof& proof = std::get<Proof>(outcome);
  Plan plan;
  plan.forward = {"cudnn sdpa forward " + proof.forward.plan, proof.forward.workspace_bytes};
  if (call.training && !forward_only)
    plan.backward = PlanDirection{"cudnn sdpa backward " + proof.backward.plan, proof.backward.workspace_bytes};
  plan.deterministic = !call.training || call.deterministic;
  plan.layout_wishes = {"query, key, value: last stride 1, other strides multiples of 16 bytes"};
  plan.steps = proof.problem.steps;
  plan.data = std::make_shared<const ClaimedProblem>(ClaimedProblem{std::move(proof.problem), headers_text(), opened.version});
  return plan;
}

std::shared_ptr<const Claim> Context::claim_sdpa(const SdpaCall& call, const Target& target,
                                                 const SdpaLayouts& layouts) const {
  state_->claims.fetch_add(1, std::memory_order_relaxed);
  thread_local std::vector<int64_t> words;
  words.clear();
  append_target(words, target);
  append_call_words(words, call, layouts);
  if (auto known = state_->find(words)) {
    state_->claim_hits.fetch_add(1, std::memory_order_relaxed);
    return known;
  }
  auto claim = std::make_shared<const Claim>(state_->ask(call, target, layouts, false));
  state_->keep(words, claim);
  return claim;
}

Claim Context::claim_forward_only(const SdpaCall& call, const Target& target) const {
  return state_->ask(call, target, {}, true);
}

std::shared_ptr<const SdpaKernel> Context::kernel(const Plan&, const Target& target) const {
  throw DeviceError("cudnn: " + target.name + " is not at hand, its plans can be proven but not run");
}

void Context::revoke(const SdpaCall& call, const Target& target, const SdpaLayouts& layouts,
                     const std::string& reason) const {
  std::vector<int64_t> words;
  append_target(words, target);
  append_call_words(words, call, layouts);
  state_->keep(words, std::make_shared<const Claim>(Refusal{RefusalCode::revoked, "sdpa: " + reason}));
}

CacheInfo Context::cache_info() const {
  CacheInfo info;
  info.claims = state_->claims;
  info.claim_hits = state_->claim_hits;
  info.proofs = state_->proofs;
  info.evictions = state_->evictions;
  return info;
}

void Context::clear_caches() const {
  std::unique_lock lock(state_->mutex);
  state_->order.clear();
  state_->answers.clear();
}

std::string build_reason() { return {}; }

}  // namespace fulmen::cudnn
