// The CUDA driver, opened at run time: no CUDA header is needed to build and no CUDA library to start. What executors
// and tools need of it: the devices and their description, memory, streams, modules and launches. Calls that fail throw
// DeviceError with the call and its status. The functions never change the caller's current context: those that need
// one set the device's primary context for their duration (ContextGuard).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "runtime/target.h"

namespace fulmen::cuda {

struct DeviceInfo {
  int index = 0;
  std::string name;
  int compute_capability = 0;  // 90 for sm_90
  int driver_version = 0;      // 13000 for CUDA 13.0
  size_t memory_bytes = 0;
  std::string description;  // the JSON that cuDNN takes for a described device
};

struct MemoryInfo {
  size_t free_bytes = 0;
  size_t total_bytes = 0;
};

enum class CaptureState { none, active, invalidated };

class Driver {
 public:
  // The process's driver, opened on first use; null where there is none or no device, with the reason.
  static const Driver* find(std::string* reason = nullptr);
  // As find, but a missing driver is a DeviceError.
  static const Driver& require();
  // Is a libcuda.so.1 in the process or on the loader's path? It may be the stand-in of executors/cudnn.
  static bool library_present();

  int device_count() const { return static_cast<int>(devices_.size()); }
  const DeviceInfo& device(int index) const;  // DeviceError if there is no such device
  Target target(int index) const;             // "cuda:0"
  MemoryInfo memory(int index) const;

  // Memory in stream order; usable while the stream is being captured.
  void* allocate(int device, size_t bytes, void* stream) const;
  void release(int device, void* memory, void* stream) const;
  // Memory that lives until release_now; 256-byte aligned.
  void* allocate_now(int device, size_t bytes) const;
  void release_now(int device, void* memory) const;

  void fill_words(int device, void* memory, uint32_t value, size_t count, void* stream) const;
  void copy_to_device(int device, void* to, const void* from, size_t bytes, void* stream) const;
  void copy_to_host(int device, void* to, const void* from, size_t bytes, void* stream) const;
  void copy_on_device(int device, void* to, const void* from, size_t bytes, void* stream) const;

  void* make_stream(int device) const;
  void destroy_stream(int device, void* stream) const;
  void synchronize(int device, void* stream) const;
  CaptureState capture_state(int device, void* stream) const;

  void* make_event(int device) const;
  void destroy_event(int device, void* event) const;
  void record(int device, void* event, void* stream) const;
  float milliseconds(int device, void* begin, void* end) const;  // waits for `end`

  void* load_module(int device, const char* image) const;  // PTX or cubin text
  void* function(int device, void* module, const char* name) const;
  void launch(int device, void* function, unsigned blocks, unsigned threads, void* stream, void** arguments) const;

  // Records what `body` enqueues on `stream` as a graph; replayed with run_graph.
  void begin_capture(int device, void* stream) const;
  void* end_capture(int device, void* stream) const;
  void run_graph(int device, void* graph, void* stream) const;

 private:
  friend class ContextGuard;
  struct Api;
  Driver() = default;
  void check(int status, const char* call) const;

  Api* api_ = nullptr;
  std::vector<DeviceInfo> devices_;
};

// Makes a device's primary context current and restores the caller's on leaving.
class ContextGuard {
 public:
  ContextGuard(const Driver& driver, int device);
  ~ContextGuard();
  ContextGuard(const ContextGuard&) = delete;
  ContextGuard& operator=(const ContextGuard&) = delete;

 private:
  const Driver& driver_;
  bool pushed_ = false;
};

}  // namespace fulmen::cuda
