// Splits work over threads. Where an OpenMP runtime is in the process already (PyTorch brings
// one), its threads are used: a second pool beside it would fight it for the cores, since its
// threads keep spinning for a while after each use. Otherwise a small pool of our own runs.
// The thread count therefore follows torch.set_num_threads and OMP_NUM_THREADS.
#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>

namespace fulmen {

// Threads that a parallel region started here would get; at least 1.
int thread_count();

// For programs with no OpenMP runtime (and for tests): 0 returns to the default.
void set_thread_count(int count);

// Looks for an OpenMP runtime again; call it after a library that brings one was loaded.
void rescan_openmp_runtime();

// "libgomp (in process)" or "own pool"
const char* thread_backend();

namespace parallel_detail {
using Body = void (*)(void* context, int thread, int thread_total);
void run(int threads, Body body, void* context);
}  // namespace parallel_detail

// Runs body(thread, total) once on each of `threads` threads and waits for all of them. The runtime may give
// fewer: `total` is how many really run, so bodies split the work by it. An exception of a body is rethrown here.
// Calls from inside a region run on the calling thread alone.
template <class F>
void parallel_region(int threads, F&& body) {
  using Fn = std::remove_reference_t<F>;
  parallel_detail::run(
      threads, [](void* context, int thread, int total) { (*static_cast<Fn*>(context))(thread, total); },
      const_cast<void*>(static_cast<const void*>(&body)));
}

// body(begin, end) over [0, count), in contiguous blocks of at least `grain`; runs inline if one block suffices.
template <class F>
void parallel_for(int64_t count, int64_t grain, F&& body) {
  if (count <= 0) return;
  if (grain < 1) grain = 1;
  const int64_t blocks = (count + grain - 1) / grain;
  const int available = blocks > 1 ? thread_count() : 1;
  const int threads = static_cast<int>(blocks < available ? blocks : available);
  if (threads <= 1) {
    body(int64_t{0}, count);
    return;
  }
  parallel_region(threads, [&](int thread, int total) {
    const int64_t begin = count * thread / total, end = count * (thread + 1) / total;
    if (begin < end) body(begin, end);
  });
}

}  // namespace fulmen
