#include "buffer_pool.h"

#include <pthread.h>
#include <sys/mman.h>

#include <cstdlib>
#include <new>
#include <string>

namespace fulmen::python {
namespace {

constexpr size_t huge_page_bytes = size_t{2} << 20;

size_t rounded(size_t bytes) {
  const size_t unit = bytes >= BufferPool::pooled_bytes ? 64 * 1024 : BufferPool::alignment;
  return bytes == 0 ? BufferPool::alignment : (bytes + unit - 1) / unit * unit;
}

// A MemoryError of Python, with words.
class OutOfMemory : public std::bad_alloc {
 public:
  explicit OutOfMemory(size_t bytes) : text_("fulmen: " + std::to_string(bytes) + " bytes of memory can't be had") {}
  const char* what() const noexcept override { return text_.c_str(); }

 private:
  std::string text_;
};

void* allocate(size_t bytes) {
  // Large blocks start on a huge page and ask for them: fewer page faults on first use, fewer TLB misses later.
  const bool large = bytes >= 2 * huge_page_bytes;
  void* data = std::aligned_alloc(large ? huge_page_bytes : BufferPool::alignment,
                                  large ? (bytes + huge_page_bytes - 1) / huge_page_bytes * huge_page_bytes : bytes);
  if (!data) throw OutOfMemory(bytes);
  if (large) madvise(data, bytes, MADV_HUGEPAGE);
  return data;
}

// Small blocks come from malloc, aligned by hand: its caches of freed blocks serve them, those of aligned_alloc don't.
// The address that malloc gave lies just before the block.
void* allocate_small(size_t bytes) {
  void* raw = std::malloc(bytes + BufferPool::alignment + sizeof(void*));
  if (!raw) throw OutOfMemory(bytes);
  const auto first = reinterpret_cast<uintptr_t>(raw) + sizeof(void*);
  void* data = reinterpret_cast<void*>((first + BufferPool::alignment - 1) / BufferPool::alignment * BufferPool::alignment);
  static_cast<void**>(data)[-1] = raw;
  return data;
}

}  // namespace

BufferPool& BufferPool::instance() {
  static BufferPool* pool = [] {
    auto* made = new BufferPool();
    // A fork while another thread is in here must not leave the child with a lock that nobody gives back.
    pthread_atfork([] { instance().mutex_.lock(); }, [] { instance().mutex_.unlock(); }, [] { instance().mutex_.unlock(); });
    return made;
  }();
  return *pool;
}

BufferPool::Block BufferPool::take(size_t bytes) {
  const size_t needed = rounded(bytes);
  if (needed < pooled_bytes) return {allocate_small(needed), needed};
  {
    const std::lock_guard lock(mutex_);
    // The smallest kept block that fits and isn't more than a quarter too large.
    const auto at = free_.lower_bound(needed);
    if (at != free_.end() && at->first <= needed + needed / 4) {
      const Block block{at->second, at->first};
      kept_bytes_ -= block.bytes;
      live_bytes_ += block.bytes;
      if (live_bytes_ > peak_bytes_) peak_bytes_ = live_bytes_;
      ++reused_;
      free_.erase(at);
      return block;
    }
    live_bytes_ += needed;
    if (live_bytes_ > peak_bytes_) peak_bytes_ = live_bytes_;
    ++allocated_;
    trim();
  }
  try {
    return {allocate(needed), needed};
  } catch (...) {
    const std::lock_guard lock(mutex_);
    live_bytes_ -= needed;
    throw;
  }
}

void BufferPool::give(Block block) noexcept {
  if (block.bytes < pooled_bytes) {
    std::free(static_cast<void**>(block.data)[-1]);
    return;
  }
  const std::lock_guard lock(mutex_);
  live_bytes_ -= block.bytes;
  try {
    free_.emplace(block.bytes, block.data);
    kept_bytes_ += block.bytes;
  } catch (...) {
    std::free(block.data);
  }
  trim();
}

// Live and kept blocks together never exceed the most that was live at once: keeping costs no peak memory.
void BufferPool::trim() noexcept {
  while (!free_.empty() && live_bytes_ + kept_bytes_ > peak_bytes_) {
    const auto smallest = free_.begin();
    kept_bytes_ -= smallest->first;
    std::free(smallest->second);
    free_.erase(smallest);
  }
}

void BufferPool::release_free() noexcept {
  const std::lock_guard lock(mutex_);
  for (const auto& [bytes, data] : free_) std::free(data);
  free_.clear();
  kept_bytes_ = 0;
  peak_bytes_ = live_bytes_;
}

BufferPool::Counts BufferPool::counts() {
  const std::lock_guard lock(mutex_);
  return {live_bytes_, peak_bytes_, kept_bytes_, reused_, allocated_};
}

}  // namespace fulmen::python
