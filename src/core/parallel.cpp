#include "core/parallel.h"

#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace fulmen {
namespace {

thread_local bool inside_region = false;

// The entry points of an OpenMP runtime that is loaded already (GCC's; LLVM's and Intel's offer the same names).
struct OpenMp {
  void (*parallel)(void (*)(void*), void*, unsigned, unsigned) = nullptr;
  int (*thread_num)() = nullptr;
  int (*num_threads)() = nullptr;
  int (*max_threads)() = nullptr;
  bool usable() const { return parallel && thread_num && num_threads && max_threads; }
};

int find_runtime(dl_phdr_info* info, size_t, void* out) {
  const char* base = info->dlpi_name ? std::strrchr(info->dlpi_name, '/') : nullptr;
  base = base ? base + 1 : info->dlpi_name;
  if (!base) return 0;
  // PyTorch's wheel carries a renamed copy (libgomp-<hash>.so.1); prefer it to a system one that something else loaded.
  const bool renamed = std::strncmp(base, "libgomp-", 8) == 0;
  const bool known = renamed || std::strncmp(base, "libgomp.so", 10) == 0 || std::strncmp(base, "libiomp5", 8) == 0 ||
                     std::strncmp(base, "libomp.so", 9) == 0;
  if (!known) return 0;
  auto& found = *static_cast<std::string*>(out);
  if (found.empty() || renamed) found = info->dlpi_name;
  return renamed;
}

OpenMp load_openmp() {
  OpenMp omp;
  std::string path;
  dl_iterate_phdr(find_runtime, &path);
  if (path.empty()) return omp;
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_NOLOAD);
  if (!library) return omp;
  omp.parallel = reinterpret_cast<decltype(omp.parallel)>(dlsym(library, "GOMP_parallel"));
  omp.thread_num = reinterpret_cast<decltype(omp.thread_num)>(dlsym(library, "omp_get_thread_num"));
  omp.num_threads = reinterpret_cast<decltype(omp.num_threads)>(dlsym(library, "omp_get_num_threads"));
  omp.max_threads = reinterpret_cast<decltype(omp.max_threads)>(dlsym(library, "omp_get_max_threads"));
  return omp;
}

std::atomic<const OpenMp*> runtime{nullptr};
std::mutex rescan_mutex;

// The runtime is never unloaded, so neither is this small record.
const OpenMp& openmp() {
  const OpenMp* current = runtime.load(std::memory_order_acquire);
  if (!current) {
    rescan_openmp_runtime();
    current = runtime.load(std::memory_order_acquire);
  }
  return *current;
}

int default_thread_count() {
  if (const char* text = std::getenv("OMP_NUM_THREADS")) {
    const int value = std::atoi(text);
    if (value > 0) return value;
  }
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return CPU_COUNT(&set) > 0 ? CPU_COUNT(&set) : 1;
  return 1;
}

std::atomic<int> requested_threads{0};

// Workers sleep on a condition variable; a region hands each the same body.
class Pool {
 public:
  void run(int threads, parallel_detail::Body body, void* context) {
    std::unique_lock<std::mutex> owner(owner_, std::try_to_lock);
    if (!owner.owns_lock()) {  // another thread's region is using the pool
      body(context, 0, 1);
      return;
    }
    {
      std::lock_guard lock(mutex_);
      while (static_cast<int>(workers_.size()) < threads - 1) {
        const int index = static_cast<int>(workers_.size()) + 1;
        workers_.emplace_back([this, index, seen = generation_] { work(index, seen); });
      }
      body_ = body;
      context_ = context;
      threads_ = threads;
      pending_ = threads - 1;
      ++generation_;
    }
    wake_.notify_all();
    body(context, 0, threads);
    std::unique_lock lock(mutex_);
    done_.wait(lock, [this] { return pending_ == 0; });
  }

 private:
  void work(int index, uint64_t seen) {
    inside_region = true;
    std::unique_lock lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return generation_ != seen; });
      seen = generation_;
      if (index >= threads_) continue;
      const auto body = body_;
      void* const context = context_;
      const int threads = threads_;
      lock.unlock();
      body(context, index, threads);
      lock.lock();
      if (--pending_ == 0) done_.notify_one();
    }
  }

  std::mutex owner_, mutex_;
  std::condition_variable wake_, done_;
  std::vector<std::thread> workers_;
  parallel_detail::Body body_ = nullptr;
  void* context_ = nullptr;
  int threads_ = 0, pending_ = 0;
  uint64_t generation_ = 0;
};

// Lives as long as the process: its sleeping threads must not outlive it, so it is never destroyed.
std::atomic<Pool*> pool{nullptr};

Pool& own_pool() {
  if (Pool* made = pool.load(std::memory_order_acquire)) return *made;
  auto mine = std::make_unique<Pool>();
  Pool* none = nullptr;
  if (pool.compare_exchange_strong(none, mine.get(), std::memory_order_acq_rel)) return *mine.release();
  return *none;
}

// A process made by fork() has one thread: nobody would wake in the pool that it inherits, and GCC's OpenMP runtime waits
// for its dead threads for ever. The child starts a pool of its own and leaves the OpenMP runtime alone.
std::atomic<bool> is_forked{false};

const bool fork_handlers = [] {
  return pthread_atfork([] { rescan_mutex.lock(); }, [] { rescan_mutex.unlock(); },
                        [] {
                          rescan_mutex.unlock();
                          is_forked.store(true);
                          pool.store(nullptr);  // the inherited one is left as it is: its locks may be held
                        }) == 0;
}();

bool uses_openmp() { return openmp().usable() && !is_forked.load(std::memory_order_relaxed); }

struct Guarded {
  parallel_detail::Body body;
  void* context;
  const OpenMp* omp;
  std::mutex mutex;
  std::exception_ptr error;

  void call(int thread, int total) {
    const bool nested = inside_region;
    inside_region = true;
    try {
      body(context, thread, total);
    } catch (...) {
      std::lock_guard lock(mutex);
      if (!error) error = std::current_exception();
    }
    inside_region = nested;
  }
};

}  // namespace

void rescan_openmp_runtime() {
  std::lock_guard lock(rescan_mutex);
  const OpenMp* current = runtime.load();
  if (current && current->usable()) return;
  if (current) {
    const OpenMp found = load_openmp();
    if (found.usable()) runtime.store(new OpenMp(found), std::memory_order_release);
    return;
  }
  runtime.store(new OpenMp(load_openmp()), std::memory_order_release);
}

int thread_count() {
  if (inside_region) return 1;
  if (const int requested = requested_threads.load(std::memory_order_relaxed)) return requested;
  const OpenMp& omp = openmp();
  if (omp.usable()) {
    const int count = omp.max_threads();
    return count > 0 ? count : 1;
  }
  static const int count = default_thread_count();
  return count;
}

void set_thread_count(int count) { requested_threads.store(count > 0 ? count : 0); }

const char* thread_backend() { return uses_openmp() ? "OpenMP runtime in process" : "own pool"; }

namespace parallel_detail {

void run(int threads, Body body, void* context) {
  if (threads <= 1 || inside_region) {
    body(context, 0, 1);
    return;
  }
  Guarded guarded{body, context, &openmp(), {}, {}};
  if (uses_openmp()) {
    guarded.omp->parallel(
        [](void* data) {
          auto& region = *static_cast<Guarded*>(data);
          region.call(region.omp->thread_num(), region.omp->num_threads());
        },
        &guarded, static_cast<unsigned>(threads), 0);
  } else {
    own_pool().run(
        threads, [](void* data, int thread, int total) { static_cast<Guarded*>(data)->call(thread, total); }, &guarded);
  }
  if (guarded.error) std::rethrow_exception(guarded.error);
}

}  // namespace parallel_detail
}  // namespace fulmen
