// The driver's functions are looked up by name; their prototypes are written out here from the public driver API
// (status and handles as plain ints and pointers), so that no vendor header is needed.
#include "runtime/cuda/driver.h"

#include <dlfcn.h>

#include <mutex>

#include "core/error.h"

namespace fulmen::cuda {

namespace {

using DevicePointer = unsigned long long;

DevicePointer address(const void* memory) { return reinterpret_cast<DevicePointer>(memory); }

// Numbers of device attributes in the driver API.
enum Attribute {
  attr_max_threads_per_block = 1,
  attr_max_block_x = 2,
  attr_max_grid_x = 5,
  attr_shared_memory_per_block = 8,
  attr_warp_size = 10,
  attr_registers_per_block = 12,
  attr_clock_khz = 13,
  attr_multiprocessors = 16,
  attr_pci_device = 34,
  attr_tcc = 35,
  attr_memory_clock_khz = 36,
  attr_l2_bytes = 38,
  attr_threads_per_multiprocessor = 39,
  attr_major = 75,
  attr_minor = 76,
  attr_registers_per_multiprocessor = 82,
  attr_cooperative_launch = 95,
  attr_shared_memory_optin = 97,
  attr_blocks_per_multiprocessor = 106,
  attr_reserved_shared_memory = 111,
};

}  // namespace

struct Driver::Api {
  int (*init)(unsigned) = nullptr;
  int (*driver_version)(int*) = nullptr;
  int (*device_count)(int*) = nullptr;
  int (*device_get)(int*, int) = nullptr;
  int (*device_name)(char*, int, int) = nullptr;
  int (*device_attribute)(int*, int, int) = nullptr;
  int (*device_memory)(size_t*, int) = nullptr;
  int (*error_name)(int, const char**) = nullptr;
  int (*retain_context)(void**, int) = nullptr;
  int (*current_context)(void**) = nullptr;
  int (*push_context)(void*) = nullptr;
  int (*pop_context)(void**) = nullptr;
  int (*memory_info)(size_t*, size_t*) = nullptr;
  int (*allocate)(DevicePointer*, size_t) = nullptr;
  int (*release)(DevicePointer) = nullptr;
  int (*allocate_async)(DevicePointer*, size_t, void*) = nullptr;
  int (*release_async)(DevicePointer, void*) = nullptr;
  int (*fill_words)(DevicePointer, unsigned, size_t, void*) = nullptr;
  int (*to_device)(DevicePointer, const void*, size_t, void*) = nullptr;
  int (*to_host)(void*, DevicePointer, size_t, void*) = nullptr;
  int (*on_device)(DevicePointer, DevicePointer, size_t, void*) = nullptr;
  int (*make_stream)(void**, unsigned) = nullptr;
  int (*destroy_stream)(void*) = nullptr;
  int (*synchronize)(void*) = nullptr;
  int (*is_capturing)(void*, int*) = nullptr;
  int (*make_event)(void**, unsigned) = nullptr;
  int (*destroy_event)(void*) = nullptr;
  int (*record)(void*, void*) = nullptr;
  int (*wait_event)(void*) = nullptr;
  int (*elapsed)(float*, void*, void*) = nullptr;
  int (*load_module)(void**, const void*) = nullptr;
  int (*get_function)(void**, void*, const char*) = nullptr;
  int (*launch)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**,
                void**) = nullptr;
  int (*begin_capture)(void*, int) = nullptr;
  int (*end_capture)(void*, void**) = nullptr;
  int (*instantiate)(void**, void*, unsigned long long) = nullptr;
  int (*run_graph)(void*, void*) = nullptr;

  std::vector<void*> contexts;  // primary contexts, retained on first use
  std::mutex mutex;

  std::string load(void* library) {
    std::string missing;
    const auto find = [&](auto& slot, const char* name) {
      void* symbol = dlsym(library, name);
      if (!symbol && missing.empty()) missing = name;
      slot = reinterpret_cast<std::remove_reference_t<decltype(slot)>>(symbol);
    };
    find(init, "cuInit");
    find(driver_version, "cuDriverGetVersion");
    find(device_count, "cuDeviceGetCount");
    find(device_get, "cuDeviceGet");
    find(device_name, "cuDeviceGetName");
    find(device_attribute, "cuDeviceGetAttribute");
    find(device_memory, "cuDeviceTotalMem_v2");
    find(error_name, "cuGetErrorName");
    find(retain_context, "cuDevicePrimaryCtxRetain");
    find(current_context, "cuCtxGetCurrent");
    find(push_context, "cuCtxPushCurrent_v2");
    find(pop_context, "cuCtxPopCurrent_v2");
    find(memory_info, "cuMemGetInfo_v2");
    find(allocate, "cuMemAlloc_v2");
    find(release, "cuMemFree_v2");
    find(allocate_async, "cuMemAllocAsync");
    find(release_async, "cuMemFreeAsync");
    find(fill_words, "cuMemsetD32Async");
    find(to_device, "cuMemcpyHtoDAsync_v2");
    find(to_host, "cuMemcpyDtoHAsync_v2");
    find(on_device, "cuMemcpyDtoDAsync_v2");
    find(make_stream, "cuStreamCreate");
    find(destroy_stream, "cuStreamDestroy_v2");
    find(synchronize, "cuStreamSynchronize");
    find(is_capturing, "cuStreamIsCapturing");
    find(make_event, "cuEventCreate");
    find(destroy_event, "cuEventDestroy_v2");
    find(record, "cuEventRecord");
    find(wait_event, "cuEventSynchronize");
    find(elapsed, "cuEventElapsedTime");
    find(load_module, "cuModuleLoadData");
    find(get_function, "cuModuleGetFunction");
    find(launch, "cuLaunchKernel");
    find(begin_capture, "cuStreamBeginCapture_v2");
    find(end_capture, "cuStreamEndCapture");
    find(instantiate, "cuGraphInstantiateWithFlags");
    find(run_graph, "cuGraphLaunch");
    return missing;
  }
};

namespace {

std::string quoted(const std::string& text) {
  std::string result = "\"";
  for (char c : text) {
    if (c == '"' || c == '\\') result += '\\';
    result += c;
  }
  return result + "\"";
}

}  // namespace

bool Driver::library_present() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW);
  if (library) dlclose(library);
  return library != nullptr;
}

const Driver* Driver::find(std::string* reason) {
  struct State {
    Driver driver;
    std::string reason;
    bool usable = false;
  };
  static State& state = *[] {
    auto* s = new State;  // lives as long as the process: threads may still run at exit
    void* library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) {
      s->reason = "no CUDA driver: libcuda.so.1 is not on the loader's path";
      return s;
    }
    auto* api = new Api;
    s->driver.api_ = api;
    if (const std::string missing = api->load(library); !missing.empty()) {
      s->reason = "the CUDA driver is too old: it has no " + missing;
      return s;
    }
    if (const int status = api->init(0)) {
      s->reason = "no CUDA device: cuInit gives status " + std::to_string(status);
      return s;
    }
    int version = 0, count = 0;
    api->driver_version(&version);
    if (api->device_count(&count) || count == 0) {
      s->reason = "no CUDA device";
      return s;
    }
    api->contexts.resize(static_cast<size_t>(count), nullptr);
    for (int index = 0; index < count; ++index) {
      int device = 0;
      api->device_get(&device, index);
      const auto attribute = [&](int number) {
        int value = 0;
        api->device_attribute(&value, number, device);
        return value;
      };
      DeviceInfo info;
      info.index = index;
      info.driver_version = version;
      char name[256] = {};
      api->device_name(name, sizeof name, device);
      info.name = name;
      api->device_memory(&info.memory_bytes, device);
      const int major = attribute(attr_major), minor = attribute(attr_minor);
      info.compute_capability = major * 10 + minor;
      const auto triple = [&](int first) {
        return "[" + std::to_string(attribute(first)) + "," + std::to_string(attribute(first + 1)) + "," +
               std::to_string(attribute(first + 2)) + "]";
      };
      const auto field = [&](const char* key, long long value) {
        return std::string(",\"") + key + "\":" + std::to_string(value);
      };
      info.description = "{\"maxGridSize\":" + triple(attr_max_grid_x) + ",\"maxBlockSize\":" + triple(attr_max_block_x) +
                         field("regsPerBlock", attribute(attr_registers_per_block)) +
                         field("multiProcessorCount", attribute(attr_multiprocessors)) +
                         field("warpSize", attribute(attr_warp_size)) +
                         field("maxSharedMemoryPerBlock", attribute(attr_shared_memory_per_block)) +
                         field("maxSharedMemoryPerBlockOptin", attribute(attr_shared_memory_optin)) +
                         field("reservedSharedMemoryPerBlock", attribute(attr_reserved_shared_memory)) +
                         field("maxRegistersPerSM", attribute(attr_registers_per_multiprocessor)) +
                         field("maxCtasPerSM", attribute(attr_blocks_per_multiprocessor)) +
                         field("maxThreadsPerBlock", attribute(attr_max_threads_per_block)) +
                         field("maxThreadsPerSM", attribute(attr_threads_per_multiprocessor)) +
                         field("pciDeviceId", attribute(attr_pci_device)) + field("isTccDriver", attribute(attr_tcc)) +
                         field("supportCoopLaunch", attribute(attr_cooperative_launch)) +
                         field("totalGlobalMem", static_cast<long long>(info.memory_bytes)) +
                         field("smClockRateKHz", attribute(attr_clock_khz)) +
                         field("memClockRateKHz", attribute(attr_memory_clock_khz)) +
                         field("l2CacheSize", attribute(attr_l2_bytes)) + field("cudaDeviceId", index) +
                         field("deviceVer", major * 100 + minor * 10) + field("driverVer", version) +
                         ",\"deviceName\":" + quoted(info.name) + "}";
      s->driver.devices_.push_back(std::move(info));
    }
    s->usable = true;
    return s;
  }();
  if (reason) *reason = state.reason;
  return state.usable ? &state.driver : nullptr;
}

const Driver& Driver::require() {
  std::string reason;
  const Driver* driver = find(&reason);
  if (!driver) throw DeviceError("cuda: " + reason);
  return *driver;
}

void Driver::check(int status, const char* call) const {
  if (status == 0) return;
  const char* name = nullptr;
  api_->error_name(status, &name);
  throw DeviceError(std::string("cuda driver: ") + call + " gives " + (name ? name : "an unknown status") + " (" +
                    std::to_string(status) + ")");
}

const DeviceInfo& Driver::device(int index) const {
  if (index < 0 || index >= device_count())
    throw DeviceError("cuda: there is no device " + std::to_string(index) + ", this machine has " +
                      std::to_string(device_count()));
  return devices_[static_cast<size_t>(index)];
}

Target Driver::target(int index) const {
  const DeviceInfo& info = device(index);
  Target target;
  target.name = "cuda:" + std::to_string(index);
  target.kind = DeviceKind::cuda;
  target.device_index = index;
  target.compute_capability = info.compute_capability;
  target.description = info.description;
  return target;
}

ContextGuard::ContextGuard(const Driver& driver, int device) : driver_(driver) {
  Driver::Api& api = *driver.api_;
  void* context = nullptr;
  {
    std::lock_guard lock(api.mutex);
    void*& kept = api.contexts.at(static_cast<size_t>(driver.device(device).index));
    if (!kept) driver.check(api.retain_context(&kept, device), "cuDevicePrimaryCtxRetain");
    context = kept;
  }
  void* current = nullptr;
  driver.check(api.current_context(&current), "cuCtxGetCurrent");
  if (current == context) return;
  driver.check(api.push_context(context), "cuCtxPushCurrent");
  pushed_ = true;
}

ContextGuard::~ContextGuard() {
  void* context = nullptr;
  if (pushed_) driver_.api_->pop_context(&context);
}

MemoryInfo Driver::memory(int index) const {
  const ContextGuard guard(*this, index);
  MemoryInfo info;
  check(api_->memory_info(&info.free_bytes, &info.total_bytes), "cuMemGetInfo");
  return info;
}

void* Driver::allocate(int device, size_t bytes, void* stream) const {
  const ContextGuard guard(*this, device);
  DevicePointer memory = 0;
  check(api_->allocate_async(&memory, bytes, stream), "cuMemAllocAsync");
  return reinterpret_cast<void*>(memory);
}

void Driver::release(int device, void* memory, void* stream) const {
  const ContextGuard guard(*this, device);
  check(api_->release_async(address(memory), stream), "cuMemFreeAsync");
}

void* Driver::allocate_now(int device, size_t bytes) const {
  const ContextGuard guard(*this, device);
  DevicePointer memory = 0;
  check(api_->allocate(&memory, bytes), "cuMemAlloc");
  return reinterpret_cast<void*>(memory);
}

void Driver::release_now(int device, void* memory) const {
  const ContextGuard guard(*this, device);
  check(api_->release(address(memory)), "cuMemFree");
}

void Driver::fill_words(int device, void* memory, uint32_t value, size_t count, void* stream) const {
  const ContextGuard guard(*this, device);
  check(api_->fill_words(address(memory), value, count, stream), "cuMemsetD32Async");
}

void Driver::copy_to_device(int device, void* to, const void* from, size_t bytes, void* stream) const {
  const ContextGuard guard(*this, device);
  check(api_->to_device(address(to), from, bytes, stream), "cuMemcpyHtoDAsync");
}

void Driver::copy_to_host(int device, void* to, const void* from, size_t bytes, void* stream) const {
  const ContextGuard guard(*this, device);
  check(api_->to_host(to, address(from), bytes, stream), "cuMemcpyDtoHAsync");
}

void Driver::copy_on_device(int device, void* to, const void* from, size_t bytes, void* stream) const {
  const ContextGuard guard(*this, device);
  check(api_->on_device(address(to), address(from), bytes, stream), "cuMemcpyDtoDAsync");
}

void* Driver::make_stream(int device) const {
  const ContextGuard guard(*this, device);
  void* stream = nullptr;
  check(api_->make_stream(&stream, 1 /* does not wait for the default stream */), "cuStreamCreate");
  return stream;
}

void Driver::destroy_stream(int device, void* stream) const {
  const ContextGuard guard(*this, device);
  check(api_->destroy_stream(stream), "cuStreamDestroy");
}

void Driver::synchronize(int device, void* stream) const {
  const ContextGuard guard(*this, device);
  check(api_->synchronize(stream), "cuStreamSynchronize");
}

CaptureState Driver::capture_state(int device, void* stream) const {
  const ContextGuard guard(*this, device);
  int state = 0;
  check(api_->is_capturing(stream, &state), "cuStreamIsCapturing");
  return state == 0 ? CaptureState::none : state == 1 ? CaptureState::active : CaptureState::invalidated;
}

void* Driver::make_event(int device) const {
  const ContextGuard guard(*this, device);
  void* event = nullptr;
  check(api_->make_event(&event, 0), "cuEventCreate");
  return event;
}

void Driver::destroy_event(int device, void* event) const {
  const ContextGuard guard(*this, device);
  check(api_->destroy_event(event), "cuEventDestroy");
}

void Driver::record(int device, void* event, void* stream) const {
  const ContextGuard guard(*this, device);
  check(api_->record(event, stream), "cuEventRecord");
}

float Driver::milliseconds(int device, void* begin, void* end) const {
  const ContextGuard guard(*this, device);
  check(api_->wait_event(end), "cuEventSynchronize");
  float elapsed = 0;
  check(api_->elapsed(&elapsed, begin, end), "cuEventElapsedTime");
  return elapsed;
}

void* Driver::load_module(int device, const char* image) const {
  const ContextGuard guard(*this, device);
  void* module = nullptr;
  check(api_->load_module(&module, image), "cuModuleLoadData");
  return module;
}

void* Driver::function(int device, void* module, const char* name) const {
  const ContextGuard guard(*this, device);
  void* function = nullptr;
  check(api_->get_function(&function, module, name), "cuModuleGetFunction");
  return function;
}

void Driver::launch(int device, void* function, unsigned blocks, unsigned threads, void* stream,
                    void** arguments) const {
  const ContextGuard guard(*this, device);
  check(api_->launch(function, blocks, 1, 1, threads, 1, 1, 0, stream, arguments, nullptr), "cuLaunchKernel");
}

void Driver::begin_capture(int device, void* stream) const {
  const ContextGuard guard(*this, device);
  check(api_->begin_capture(stream, 0 /* unsafe calls of any thread end it */), "cuStreamBeginCapture");
}

void* Driver::end_capture(int device, void* stream) const {
  const ContextGuard guard(*this, device);
  void *graph = nullptr, *runnable = nullptr;
  check(api_->end_capture(stream, &graph), "cuStreamEndCapture");
  check(api_->instantiate(&runnable, graph, 0), "cuGraphInstantiate");
  return runnable;
}

void Driver::run_graph(int device, void* graph, void* stream) const {
  const ContextGuard guard(*this, device);
  check(api_->run_graph(graph, stream), "cuGraphLaunch");
}

}  // namespace fulmen::cuda
