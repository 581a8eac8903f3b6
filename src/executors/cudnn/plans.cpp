#include "executors/cudnn/plans.h"

#include <algorithm>
#include <charconv>

#include "core/error.h"
#include "executors/cudnn/library.h"
#include "runtime/cuda/driver.h"

namespace fulmen::cudnn {

Faults::Faults(const std::string& text) {
  static constexpr const char* names[] = {"build", "forward", "backward"};
  for (size_t at = 0; at < text.size();) {
    size_t end = text.find(',', at);
    if (end == std::string::npos) end = text.size();
    const std::string item = text.substr(at, end - at);
    const size_t colon = item.find(':');
    int64_t times = -1;
    if (colon != std::string::npos) std::from_chars(item.data() + colon + 1, item.data() + item.size(), times);
    for (int i = 0; i < step_count; ++i)
      if (item.substr(0, colon) == names[i]) left_[i] = times;
    at = end + 1;
  }
}

bool Faults::take(Step step) {
  int64_t left = left_[step].load(std::memory_order_relaxed);
  if (left == 0) return false;
  if (left > 0) --left_[step];
  return true;
}

// Handles that no thread holds now, by device. A thread gives its handles back when it ends. They are never destroyed:
// at the end of a process the library may be gone before them.
struct Plans::HandlePool {
  std::mutex mutex;
  std::unordered_map<int, std::vector<void*>> idle;
};

void* Plans::handle(int device, void* stream) {
  struct Held {
    std::weak_ptr<HandlePool> pool;
    HandlePool* owner;
    int device;
    void* handle;
    void* stream;
  };
  struct ThreadHandles {
    std::vector<Held> held;
    ~ThreadHandles() {
      for (Held& h : held)
        if (auto pool = h.pool.lock()) {
          std::lock_guard lock(pool->mutex);
          pool->idle[h.device].push_back(h.handle);
        }
    }
  };
  thread_local ThreadHandles mine;
  Held* found = nullptr;
  for (Held& h : mine.held)
    if (h.owner == handles_.get() && h.device == device && !h.pool.expired()) found = &h;
  if (!found) {
    void* handle = nullptr;
    {
      std::lock_guard lock(handles_->mutex);
      if (auto& idle = handles_->idle[device]; !idle.empty()) {
        handle = idle.back();
        idle.pop_back();
      }
    }
    if (!handle) {
      const cuda::ContextGuard guard(cuda::Driver::require(), device);
      handle = make_handle();
    }
    set_stream(handle, stream);
    mine.held.push_back({handles_, handles_.get(), device, handle, stream});
    return handle;
  }
  if (found->stream != stream) {
    set_stream(found->handle, stream);
    found->stream = stream;
  }
  return found->handle;
}

Plans::Plans(const Options& options, std::function<void(const std::string&)> warn, int library_version)
    : library_version_(library_version),
      faults_(options.fault),
      store_(options.plan_store && !options.cache_folder.empty() ? options.cache_folder + "/cudnn_plans" : std::string(),
             options.store_limit_bytes, std::move(warn)),
      handles_(std::make_shared<HandlePool>()) {}

Plans::~Plans() = default;

std::vector<int64_t> Plans::words(const Problem& problem, Direction direction, const Target& target) const {
  std::vector<int64_t> words = plan_words(problem, direction == Direction::backward);
  words.push_back(static_cast<int64_t>(direction));
  words.push_back(target.device_index);
  return words;
}

std::string Plans::store_key(const std::vector<int64_t>& words, const Target& target) const {
  std::string key = "cudnn " + std::to_string(library_version_) + "; " + headers_text() + "; " + target.description + ";";
  // The device's index isn't part of it: any GPU of the same description can run the plan.
  for (size_t i = 0; i + 1 < words.size(); ++i) key += ' ' + std::to_string(words[i]);
  return key;
}

std::shared_ptr<DevicePlan> Plans::keep(const Problem& problem, Direction direction, const Target& target,
                                        std::shared_ptr<const DevicePlan::Built> built) {
  auto plan = std::make_shared<DevicePlan>();
  plan->plans_ = this;
  plan->problem_ = problem;
  plan->direction_ = direction;
  plan->target_ = target;
  plan->built_ = std::move(built);
  std::lock_guard lock(mutex_);
  std::erase_if(plans_, [](const auto& entry) { return entry.second.expired(); });
  plans_[words(problem, direction, target)] = plan;
  return plan;
}

std::shared_ptr<const DevicePlan> Plans::find(const Problem& problem, Direction direction, const Target& target) {
  const std::vector<int64_t> key = words(problem, direction, target);
  {
    std::lock_guard lock(mutex_);
    if (const auto at = plans_.find(key); at != plans_.end())
      if (auto plan = at->second.lock()) {
        ++counters_.hits;
        return plan;
      }
  }
  const std::string stored_key = store_key(key, target);
  std::optional<StoredPlan> stored = store_.load(stored_key);
  if (!stored) return nullptr;
  std::string reason;
  auto built = std::make_shared<DevicePlan::Built>();
  const cuda::ContextGuard guard(cuda::Driver::require(), target.device_index);
  built->graph = Graph::restore(stored->bytes, handle(target.device_index, nullptr), reason);
  if (!built->graph) {
    store_.discard(stored_key, "would not load (" + reason + ")");
    return nullptr;
  }
  built->index = stored->index;
  built->name = stored->name;
  built->workspace_bytes = built->graph->workspace_bytes();
  ++counters_.loads;
  return keep(problem, direction, target, std::move(built));
}

std::shared_ptr<const DevicePlan::Built> Plans::build_from(Graph* graph, std::unique_ptr<Graph> owned, int64_t first,
                                                           int64_t count, Direction direction, std::string& reasons) {
  for (int64_t index = first; index < count; ++index) {
    std::string reason = "a fault injected by FULMEN_CUDNN_FAULT";
    if (!faults_.take(Faults::build) && graph->build(index, reason)) {
      auto built = std::make_shared<DevicePlan::Built>();
      built->index = index;
      built->name = graph->plan_name(index);
      built->workspace_bytes = graph->workspace_bytes();
      built->graph = std::move(owned);
      ++(direction == Direction::forward ? counters_.builds_forward : counters_.builds_backward);
      return built;
    }
    ++counters_.failures;
    reasons += (reasons.empty() ? "plan " : "; plan ") + std::to_string(index) + ": " + reason;
  }
  return nullptr;
}

std::shared_ptr<const DevicePlan> Plans::build(const Problem& problem, Direction direction, const Target& target,
                                               std::unique_ptr<Graph> proven, std::string& reasons) {
  const cuda::ContextGuard guard(cuda::Driver::require(), target.device_index);
  Graph* graph = proven.get();
  auto built = build_from(graph, std::move(proven), 0, graph->plan_count(), direction, reasons);
  if (!built) return nullptr;
  StoredPlan stored{built->index, built->name, graph->serialize()};
  if (!stored.bytes.empty()) store_.save(store_key(words(problem, direction, target), target), stored);
  return keep(problem, direction, target, std::move(built));
}

void Plans::clear() {
  std::lock_guard lock(mutex_);
  plans_.clear();
}

size_t Plans::count() {
  std::lock_guard lock(mutex_);
  return static_cast<size_t>(
      std::count_if(plans_.begin(), plans_.end(), [](const auto& entry) { return !entry.second.expired(); }));
}

std::shared_ptr<const DevicePlan::Built> DevicePlan::built() const {
  std::lock_guard lock(mutex_);
  return built_;
}

size_t DevicePlan::workspace_bytes() const { return built()->workspace_bytes; }
std::string DevicePlan::name() const { return built()->name; }

// Plans after the failed one, from a fresh graph: a restored one holds a single plan.
std::shared_ptr<const DevicePlan::Built> DevicePlan::next_after(const Built& failed, const std::string& why) const {
  std::lock_guard lock(mutex_);
  if (built_.get() != &failed) return built_;  // another thread was here first
  ++plans_->counters_.failures;
  auto graph = std::make_unique<Graph>(
      problem_, direction_,
      Side{plans_->handle(target_.device_index, nullptr), target_.description, target_.compute_capability});
  std::string reasons = "plan " + std::to_string(failed.index) + " (" + failed.name + "): " + why;
  const Answer answer = graph->prove();
  Graph* raw = graph.get();
  std::shared_ptr<const Built> next;
  if (answer.verdict == Verdict::accepted)
    next = plans_->build_from(raw, std::move(graph), failed.index + 1, answer.plan_count, direction_, reasons);
  if (!next)
    throw DeviceError("cudnn: no plan of the " +
                      std::string(direction_ == Direction::forward ? "forward" : "backward") + " runs: " + reasons);
  return built_ = next;
}

void DevicePlan::execute(void* stream, void* const (&pointers)[slot_count], void* workspace,
                         size_t workspace_bytes) const {
  const int device = target_.device_index;
  const cuda::Driver& driver = cuda::Driver::require();
  const cuda::ContextGuard guard(driver, device);
  const Faults::Step step = direction_ == Direction::forward ? Faults::forward : Faults::backward;
  std::shared_ptr<const Built> plan = built();
  while (true) {
    void* own = nullptr;
    try {
      if (plans_->faults_.take(step)) throw DeviceError("a fault injected by FULMEN_CUDNN_FAULT");
      if (plan->workspace_bytes > workspace_bytes) own = driver.allocate(device, plan->workspace_bytes, stream);
      plan->graph->execute(plans_->handle(device, stream), pointers, own ? own : workspace);
      if (own) driver.release(device, own, stream);
      return;
    } catch (const DeviceError& error) {
      if (own) driver.release(device, own, stream);
      if (driver.capture_state(device, stream) != cuda::CaptureState::none) throw;  // nothing can be built then
      plan = next_after(*plan, error.what());
    }
  }
}

}  // namespace fulmen::cudnn
