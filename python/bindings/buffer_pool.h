// Host memory that is used again: arenas, saved values and results of compiled programs come from here, so that the
// pages of a training step stay mapped from step to step. Blocks below the pooled size come straight from the heap.
// Thread-safe. Device memory isn't handled here; it comes from the framework's own allocator (dlpack.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <utility>

namespace fulmen::python {

class BufferPool {
 public:
  static constexpr size_t alignment = 64;
  static constexpr size_t pooled_bytes = 256 * 1024;  // smaller blocks aren't kept

  // The process's pool. It is never destroyed: tensors that own blocks may die after everything else.
  static BufferPool& instance();

  struct Block {
    void* data = nullptr;
    size_t bytes = 0;  // as allocated; pass the block back unchanged
  };

  Block take(size_t bytes);  // not initialised
  void give(Block block) noexcept;
  void release_free() noexcept;  // gives all kept blocks back to the system

  struct Counts {
    size_t live_bytes, peak_bytes, kept_bytes, reused, allocated;
  };
  Counts counts();

 private:
  void trim() noexcept;

  std::mutex mutex_;
  std::multimap<size_t, void*> free_;
  size_t live_bytes_ = 0, peak_bytes_ = 0, kept_bytes_ = 0, reused_ = 0, allocated_ = 0;
};

// A block that goes back to the pool when it is dropped.
class PoolBuffer {
 public:
  PoolBuffer() = default;
  explicit PoolBuffer(size_t bytes) : block_(BufferPool::instance().take(bytes)) {}
  PoolBuffer(PoolBuffer&& other) noexcept : block_(std::exchange(other.block_, {})) {}
  PoolBuffer& operator=(PoolBuffer&& other) noexcept {
    std::swap(block_, other.block_);
    return *this;
  }
  ~PoolBuffer() {
    if (block_.data) BufferPool::instance().give(block_);
  }
  void* data() const { return block_.data; }
  size_t bytes() const { return block_.bytes; }
  BufferPool::Block release() { return std::exchange(block_, {}); }

 private:
  BufferPool::Block block_;
};

}  // namespace fulmen::python
