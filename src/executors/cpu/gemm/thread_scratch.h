// Memory that a thread keeps between products, and a barrier for threads that are all running.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <new>
#include <thread>

namespace fulmen::cpu {

// At least `bytes` bytes, 64-byte aligned, the calling thread's own until its next call. It grows as needed and is
// freed when the thread ends.
inline char* thread_scratch(size_t bytes) {
  struct Free {
    void operator()(char* p) const { ::operator delete(p, std::align_val_t{64}); }
  };
  thread_local std::unique_ptr<char, Free> memory;
  thread_local size_t held = 0;
  if (held < bytes) {
    memory.reset();
    held = 0;
    memory.reset(static_cast<char*>(::operator new(bytes, std::align_val_t{64})));
    held = bytes;
  }
  return memory.get();
}

// Waits by spinning, and yields after a while: threads of a region arrive within microseconds of one another, unless
// others have taken the cores.
class SpinBarrier {
 public:
  void wait(int total) {
    if (total == 1) return;
    const int generation = generation_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == total) {
      arrived_.store(0, std::memory_order_relaxed);
      generation_.store(generation + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; generation_.load(std::memory_order_acquire) == generation; ++spins) {
      if (spins > 4000) {
        std::this_thread::yield();
      } else {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
      }
    }
  }

 private:
  std::atomic<int> arrived_{0}, generation_{0};
};

}  // namespace fulmen::cpu
