// Built plans of a GPU at hand: found in memory, restored from the store, or proven and built. A plan that fails to
// build or to run gives way to the next of the heuristics' list; when none is left, DeviceError (the caller revokes the
// claim then). Handles are kept a device and a thread.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "executors/cudnn/converter.h"
#include "executors/cudnn/graph.h"
#include "executors/cudnn/options.h"
#include "executors/cudnn/plan_store.h"
#include "runtime/target.h"

namespace fulmen::cudnn {

struct PlanCounters {
  std::atomic<int64_t> hits{0}, builds_forward{0}, builds_backward{0}, loads{0}, failures{0};
};

// Steps of a plan that a test can make fail (Options::fault).
class Faults {
 public:
  enum Step { build, forward, backward, step_count };
  explicit Faults(const std::string& text);
  bool take(Step step);

 private:
  std::atomic<int64_t> left_[step_count]{};  // -1: always
};

class Plans;

// One direction of one problem on one device.
class DevicePlan {
 public:
  size_t workspace_bytes() const;
  std::string name() const;

  // Runs it. If the plan fails, the next one is built and runs instead, with workspace of its own where it needs more.
  void execute(void* stream, void* const (&pointers)[slot_count], void* workspace, size_t workspace_bytes) const;

 private:
  friend class Plans;
  struct Built {
    std::unique_ptr<Graph> graph;
    int64_t index = 0;
    std::string name;
    size_t workspace_bytes = 0;
  };

  std::shared_ptr<const Built> built() const;
  std::shared_ptr<const Built> next_after(const Built& failed, const std::string& why) const;

  Plans* plans_ = nullptr;
  Problem problem_;
  Direction direction_ = Direction::forward;
  Target target_;
  mutable std::mutex mutex_;
  mutable std::shared_ptr<const Built> built_;
};

class Plans {
 public:
  Plans(const Options& options, std::function<void(const std::string&)> warn, int library_version);
  ~Plans();

  // This thread's handle on a device, bound to a stream.
  void* handle(int device, void* stream);

  // From memory or the store; null if it has to be proven and built.
  std::shared_ptr<const DevicePlan> find(const Problem& problem, Direction direction, const Target& target);

  // Builds the first plan that builds of a proven graph and keeps it in both places. Null with the reasons if none does.
  std::shared_ptr<const DevicePlan> build(const Problem& problem, Direction direction, const Target& target,
                                          std::unique_ptr<Graph> proven, std::string& reasons);

  void clear();
  size_t count();
  PlanCounters& counters() { return counters_; }
  const PlanStore& store() const { return store_; }

 private:
  friend class DevicePlan;
  struct HandlePool;

  std::vector<int64_t> words(const Problem& problem, Direction direction, const Target& target) const;
  std::string store_key(const std::vector<int64_t>& words, const Target& target) const;
  std::shared_ptr<DevicePlan> keep(const Problem& problem, Direction direction, const Target& target,
                                   std::shared_ptr<const DevicePlan::Built> built);
  std::shared_ptr<const DevicePlan::Built> build_from(Graph* graph, std::unique_ptr<Graph> owned, int64_t first,
                                                      int64_t count, Direction direction, std::string& reasons);

  struct WordsHash {
    size_t operator()(const std::vector<int64_t>& w) const { return hash_words(w); }
  };

  int library_version_;
  PlanCounters counters_;
  Faults faults_;
  PlanStore store_;
  std::shared_ptr<HandlePool> handles_;
  std::mutex mutex_;
  // Plans live as long as a claim holds them; the claim cache is bounded (Options::plan_limit).
  std::unordered_map<std::vector<int64_t>, std::weak_ptr<DevicePlan>, WordsHash> plans_;
};

}  // namespace fulmen::cudnn
