// Built plans on disk, so that a new process need not build what this machine built before. One file a plan, named by a
// hash of everything it depends on (versions, GPU, driver, the problem's words); the whole key stands in the file and
// must match. Written beside and renamed, so readers see whole files and two writers lose nothing; checksummed, so a
// damaged or foreign file is never used: it is removed, reported once, and the plan is built anew. The folder's size is
// bounded, the files used longest ago go first.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace fulmen::cudnn {

struct StoredPlan {
  int64_t index = 0;  // of the heuristics' list
  std::string name;
  std::vector<uint8_t> bytes;
};

class PlanStore {
 public:
  // An empty folder switches the store off. `warn` gets at most one message a kind of trouble.
  PlanStore(std::string folder, uint64_t limit_bytes, std::function<void(const std::string&)> warn);

  std::optional<StoredPlan> load(const std::string& key);
  void save(const std::string& key, const StoredPlan& plan);
  // For a plan that was read but would not load into the library.
  void discard(const std::string& key, const std::string& why);

  int64_t damaged() const { return damaged_; }
  int64_t writes() const { return writes_; }

  std::string path_of(const std::string& key) const;

 private:
  void trim();
  void warn_once(bool& said, const std::string& message);

  std::string folder_;
  uint64_t limit_bytes_;
  std::function<void(const std::string&)> warn_;
  std::mutex mutex_;
  bool said_damaged_ = false, said_write_ = false;
  std::atomic<int64_t> damaged_{0}, writes_{0};
};

}  // namespace fulmen::cudnn
