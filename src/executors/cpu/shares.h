// Tasks for threads by share: see Shares.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

namespace fulmen::cpu {

// Hands out units 0 to count - 1. Each thread has a share of neighbours, the same one from call to call, so that what a
// core wrote it mostly reads again; whoever is done with its own takes from the others'.
class Shares {
 public:
  explicit Shares(int threads) : taken_(std::make_unique<Counter[]>(static_cast<size_t>(threads))) {}

  // Before a round; by one thread, while the others wait.
  void reset(int total) {
    for (int i = 0; i < total; ++i) taken_[static_cast<size_t>(i)].value.store(0, std::memory_order_relaxed);
  }
  static int64_t begin(int64_t count, int owner, int total) { return count * owner / total; }

  // Calls f(first unit of a share, units in it, which of `rounds` x units of the share is taken) until none is left. A
  // share's items are taken in order, `rounds` items a unit.
  template <class F>
  void take_all(int64_t count, int64_t rounds, int thread, int total, F&& f) {
    for (int i = 0; i < total; ++i) {
      const int owner = (thread + i) % total;
      const int64_t first = begin(count, owner, total), units = begin(count, owner + 1, total) - first;
      auto& taken = taken_[static_cast<size_t>(owner)].value;
      for (int64_t item; (item = taken.fetch_add(1, std::memory_order_relaxed)) < units * rounds;) f(first, units, item);
    }
  }

 private:
  struct alignas(64) Counter {
    std::atomic<int64_t> value{0};
  };
  std::unique_ptr<Counter[]> taken_;
};

}  // namespace fulmen::cpu
