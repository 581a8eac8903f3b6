// The claim of one call: cache, rules, availability, known faults, the library's word, and on a GPU at hand the built
// plans. See cudnn.h for the order and the reasons.
#include <atomic>
#include <cstdio>
#include <mutex>
#include <set>
#include <shared_mutex>
#include <unordered_map>
#include <unordered_set>

#include "core/error.h"
#include "executors/cudnn/cudnn.h"
#include "executors/cudnn/device_kernel.h"
#include "executors/cudnn/graph.h"
#include "executors/cudnn/known_faults.h"
#include "executors/cudnn/library.h"
#include "executors/cudnn/proof.h"
#include "executors/cudnn/rules.h"
#include "runtime/cuda/driver.h"

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
  struct Entry {
    std::shared_ptr<const Claim> claim;
    bool holds_plans = false;
    mutable std::atomic<uint64_t> used{0};
  };

  Options options;
  mutable std::shared_mutex mutex;
  std::unordered_map<std::vector<int64_t>, std::unique_ptr<Entry>, WordsHash> answers;
  size_t plan_holders = 0;
  std::mutex asking;  // one question at a time: first claims are rare, and a plan is built once
  std::atomic<uint64_t> clock{0};
  std::atomic<int64_t> claims{0}, claim_hits{0}, proofs{0}, evictions{0}, shared_claims{0};
  std::shared_ptr<Plans> plans;  // made on the first claim for a GPU at hand; under `asking`
  std::shared_ptr<Converter> converter;
  // What was proven on a device at hand and runs on shared plans, by its own plans' words: other claims that come to the
  // same (other layouts of what arrives) aren't proven again; under `asking`.
  std::unordered_set<std::vector<int64_t>, WordsHash> proven;
  // Lengths with plans of their own, by family (problem.h); under `asking`.
  std::unordered_map<std::vector<int64_t>, std::set<std::pair<int64_t, int64_t>>, WordsHash> exact_lengths;

  const Library& library() const {
    const Library& opened = open_library(options);
    use_library(opened.handle);
    return opened;
  }

  std::shared_ptr<const Claim> find(const std::vector<int64_t>& words) {
    std::shared_lock lock(mutex);
    const auto at = answers.find(words);
    if (at == answers.end()) return nullptr;
    at->second->used.store(clock.fetch_add(1, std::memory_order_relaxed), std::memory_order_relaxed);
    return at->second->claim;
  }

  void keep(const std::vector<int64_t>& words, std::shared_ptr<const Claim> claim) {
    auto entry = std::make_unique<Entry>();
    const auto* plan = std::get_if<Plan>(claim.get());
    entry->holds_plans = plan && static_cast<const ClaimedProblem*>(plan->data.get())->device_plans;
    entry->claim = std::move(claim);
    entry->used = clock++;
    std::unique_lock lock(mutex);
    plan_holders += entry->holds_plans;
    std::unique_ptr<Entry>& slot = answers[words];
    if (slot) plan_holders -= slot->holds_plans;
    slot = std::move(entry);
    while (plan_holders > options.plan_limit) evict(true);
    while (answers.size() > options.claim_limit) evict(false);
  }

  // The entry used longest ago. Rare, so a walk will do.
  void evict(bool plan_holder) {
    auto oldest = answers.end();
    for (auto at = answers.begin(); at != answers.end(); ++at)
      if ((!plan_holder || at->second->holds_plans) && (oldest == answers.end() || at->second->used < oldest->second->used))
        oldest = at;
    if (oldest == answers.end()) return;
    plan_holders -= oldest->second->holds_plans;
    answers.erase(oldest);
    ++evictions;
  }

  Claim ask(const SdpaCall& call, const Target& target, const SdpaLayouts& layouts, bool forward_only);
  Claim ask_described(const Problem& problem, const Target& target, const Library& opened, bool forward_only);
  Claim ask_device(const Problem& problem, const Target& target, const Library& opened);
  bool share_plans(const Problem& proven, const Target& target, const Side& side, const Library& opened, DevicePlans& into);
  Plan plan_of(Problem problem, const Library& opened, PlanDirection forward, std::optional<PlanDirection> backward,
               std::shared_ptr<const void> device_plans) const;
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

Plan Context::State::plan_of(Problem problem, const Library& opened, PlanDirection forward,
                             std::optional<PlanDirection> backward, std::shared_ptr<const void> device_plans) const {
  Plan plan;
  plan.forward = {"cudnn sdpa forward " + forward.kernel, forward.workspace_bytes};
  if (backward) plan.backward = PlanDirection{"cudnn sdpa backward " + backward->kernel, backward->workspace_bytes};
  plan.deterministic = !problem.training || problem.deterministic;
  plan.layout_wishes = {"query, key, value: last stride 1, other strides multiples of 16 bytes"};
  plan.steps = problem.steps;
  plan.data = std::make_shared<const ClaimedProblem>(
      ClaimedProblem{std::move(problem), headers_text(), opened.version, std::move(device_plans)});
  return plan;
}

Claim Context::State::ask_described(const Problem& problem, const Target& target, const Library& opened,
                                    bool forward_only) {
  if (const std::string& driver = ensure_driver_library(); driver.starts_with("no"))
    return Refusal{RefusalCode::prerequisite_missing, "sdpa: cudnn can't be asked, there is " + driver};
  const Side side{nullptr, target.description, target.compute_capability};
  int asked = 0;
  std::lock_guard lock(asking);
  auto outcome = prove(problem, side, {opened.version, target.name, options.workspace_limit_bytes, forward_only, options.ignored_faults}, asked);
  proofs += asked;
  if (auto* refusal = std::get_if<Refusal>(&outcome)) return std::move(*refusal);
  Proof& proof = std::get<Proof>(outcome);
  std::optional<PlanDirection> backward;
  if (problem.training && !forward_only)
    backward = PlanDirection{proof.backward.plan, proof.backward.workspace_bytes};
  return plan_of(std::move(proof.problem), opened, {proof.forward.plan, proof.forward.workspace_bytes}, backward, nullptr);
}

// A kind of call that comes in ever new lengths: from the exact_lengths-th on they share padded plans, built once a power
// of two, so that a run over many lengths builds few. False where the call gets plans of its own.
bool Context::State::share_plans(const Problem& proven, const Target& target, const Side& side, const Library& opened,
                                 DevicePlans& into) {
  auto& lengths = exact_lengths[family_words(proven)];
  const std::pair mine{proven.query_len(), proven.key_len()};
  if (lengths.count(mine) || lengths.size() < options.exact_lengths) {
    lengths.insert(mine);
    return false;
  }
  const std::optional<Problem> shared = shared_problem(proven, length_bucket(proven));
  if (!shared) return false;
  auto forward = plans->find(*shared, Direction::forward, target);
  auto backward = shared->training ? plans->find(*shared, Direction::backward, target) : nullptr;
  if (!forward || (shared->training && !backward)) {
    int asked = 0;
    auto outcome = prove(*shared, side, {opened.version, target.name, options.workspace_limit_bytes, false, options.ignored_faults}, asked);
    proofs += asked;
    auto* proof = std::get_if<Proof>(&outcome);
    if (!proof) return false;
    std::string reasons;
    if (!forward) forward = plans->build(*shared, Direction::forward, target, std::move(proof->forward_graph), reasons);
    if (shared->training && !backward)
      backward = plans->build(*shared, Direction::backward, target, std::move(proof->backward_graph), reasons);
    if (!forward || (shared->training && !backward)) return false;
  }
  into.forward = std::move(forward);
  into.backward = std::move(backward);
  into.shared = shared;
  ++shared_claims;
  return true;
}

Claim Context::State::ask_device(const Problem& problem, const Target& target, const Library& opened) {
  std::string missing;
  if (!cuda::Driver::find(&missing)) return Refusal{RefusalCode::unavailable, "sdpa: cudnn has no device, " + missing};
  std::lock_guard lock(asking);
  if (!plans) {
    const auto warn = options.warn ? options.warn : [](const std::string& message) {
      std::fprintf(stderr, "fulmen: warning: %s\n", message.c_str());
    };
    plans = std::make_shared<Plans>(options, warn, opened.version);
    converter = std::make_shared<Converter>(opened.path.substr(0, opened.path.find_last_of('/')));
  }
  auto device_plans = std::make_shared<DevicePlans>();
  device_plans->plans = plans;
  device_plans->converter = converter;
  // Built before, by this process or another: then it was proven before, too.
  Problem chosen = cured(problem, opened.version, target.compute_capability, options.ignored_faults);
  if (!refusing_fault(chosen, opened.version, target.compute_capability, options.ignored_faults)) {
    device_plans->forward = plans->find(chosen, Direction::forward, target);
    if (chosen.training) device_plans->backward = plans->find(chosen, Direction::backward, target);
  }
  std::vector<int64_t> words = plan_words(chosen, false);
  const std::vector<int64_t> backward_words = plan_words(chosen, true);
  words.insert(words.end(), backward_words.begin(), backward_words.end());
  words.push_back(target.device_index);
  const auto share = [&](const Side& side) {
    if (!share_plans(chosen, target, side, opened, *device_plans)) return;
    if (proven.size() >= options.claim_limit) proven.clear();
    proven.insert(words);
    chosen.full_lengths = false;
    chosen.steps = {"copied into padded tensors of length " + std::to_string(device_plans->shared->query_len()) +
                    ", whose plan many lengths share (docs/attention.md)"};
  };
  if (device_plans->forward && (!chosen.training || device_plans->backward))
    exact_lengths[family_words(chosen)].insert({chosen.query_len(), chosen.key_len()});
  if (!device_plans->forward && proven.count(words)) {
    const cuda::ContextGuard guard(cuda::Driver::require(), target.device_index);
    share({plans->handle(target.device_index, nullptr), target.description, target.compute_capability});
  }
  if (!device_plans->forward || (chosen.training && !device_plans->backward)) {
    const cuda::ContextGuard guard(cuda::Driver::require(), target.device_index);
    const Side side{plans->handle(target.device_index, nullptr), target.description, target.compute_capability};
    int asked = 0;
    auto outcome = prove(problem, side, {opened.version, target.name, options.workspace_limit_bytes, false, options.ignored_faults}, asked);
    proofs += asked;
    if (auto* refusal = std::get_if<Refusal>(&outcome)) return std::move(*refusal);
    Proof& proof = std::get<Proof>(outcome);
    chosen = std::move(proof.problem);
    std::string reasons;
    const std::string library_name = "sdpa: cudnn " + version_text(opened.version);
    share(side);
    if (!device_plans->forward)
      device_plans->forward = plans->build(chosen, Direction::forward, target, std::move(proof.forward_graph), reasons);
    if (!device_plans->forward)
      return Refusal{RefusalCode::forward_unsupported, library_name + " accepts the forward and builds no plan of it: " + reasons};
    if (chosen.training && !device_plans->backward)
      device_plans->backward = plans->build(chosen, Direction::backward, target, std::move(proof.backward_graph), reasons);
    if (chosen.training && !device_plans->backward)
      return Refusal{RefusalCode::backward_unsupported, library_name + " accepts the backward and builds no plan of it: " + reasons};
  }
  std::optional<PlanDirection> backward;
  if (chosen.training) backward = PlanDirection{device_plans->backward->name(), device_plans->backward->workspace_bytes()};
  for (const PlanDirection& direction :
       {PlanDirection{"forward", device_plans->forward->workspace_bytes()}, backward.value_or(PlanDirection{})})
    if (options.workspace_limit_bytes > 0 && direction.workspace_bytes > static_cast<size_t>(options.workspace_limit_bytes))
      return Refusal{RefusalCode::too_large, "sdpa: cudnn's plan wants " + std::to_string(direction.workspace_bytes) +
                                                 " bytes of workspace, the limit is " +
                                                 std::to_string(options.workspace_limit_bytes)};
  PlanDirection forward{device_plans->forward->name(), device_plans->forward->workspace_bytes()};
  return plan_of(std::move(chosen), opened, std::move(forward), backward, std::move(device_plans));
}

Claim Context::State::ask(const SdpaCall& call, const Target& target, const SdpaLayouts& layouts, bool forward_only) {
  if (auto refusal = apply_rules(call, target)) return std::move(*refusal);
  const Library& opened = library();
  if (!opened.handle) return Refusal{RefusalCode::unavailable, "sdpa: " + opened.problem};
  const Problem problem = problem_of(call, layouts);
  return target.described ? ask_described(problem, target, opened, forward_only) : ask_device(problem, target, opened);
}

std::shared_ptr<const Claim> Context::claim_sdpa(const SdpaCall& call, const Target& target,
                                                 const SdpaLayouts& layouts, const void* stream) const {
  state_->claims.fetch_add(1, std::memory_order_relaxed);
  thread_local std::vector<int64_t> words;
  words.clear();
  append_target(words, target);
  append_call_words(words, call, layouts);
  if (auto known = state_->find(words)) {
    state_->claim_hits.fetch_add(1, std::memory_order_relaxed);
    return known;
  }
  if (stream && !target.described && target.kind == DeviceKind::cuda)
    if (const cuda::Driver* driver = cuda::Driver::find();
        driver && driver->capture_state(target.device_index, const_cast<void*>(stream)) != cuda::CaptureState::none)
      throw DeviceError("sdpa: the first call of this kind builds cudnn plans, which can't be captured in a CUDA graph; "
                        "run it once before the capture");
  auto claim = std::make_shared<const Claim>(state_->ask(call, target, layouts, false));
  state_->keep(words, claim);
  return claim;
}

Claim Context::claim_forward_only(const SdpaCall& call, const Target& target) const {
  return state_->ask(call, target, {}, true);
}

std::shared_ptr<const SdpaKernel> Context::kernel(const Plan& plan, const Target& target) const {
  auto claimed = std::static_pointer_cast<const ClaimedProblem>(plan.data);
  auto device_plans = std::static_pointer_cast<const DevicePlans>(claimed->device_plans);
  if (!device_plans)
    throw DeviceError("cudnn: " + target.name + " is not at hand, its plans can be proven but not run");
  return make_device_kernel(std::move(claimed), std::move(device_plans), target.device_index);
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
  info.shared = state_->shared_claims;
  std::lock_guard lock(state_->asking);
  if (!state_->plans) return info;
  const PlanCounters& counters = state_->plans->counters();
  info.plan_hits = counters.hits;
  info.builds_forward = counters.builds_forward;
  info.builds_backward = counters.builds_backward;
  info.loads_from_store = counters.loads;
  info.plan_failures = counters.failures;
  info.store_writes = state_->plans->store().writes();
  info.store_damaged = state_->plans->store().damaged();
  info.plans = static_cast<int64_t>(state_->plans->count());
  return info;
}

void Context::clear_caches() const {
  std::unique_lock lock(state_->mutex);
  state_->answers.clear();
  state_->plan_holders = 0;
}

std::string build_reason() { return {}; }

}  // namespace fulmen::cudnn
