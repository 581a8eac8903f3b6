#include "executors/onednn/library.h"

#include <dlfcn.h>

#include "core/error.h"

namespace fulmen::onednn {
namespace {

Library open_library() {
  Library lib;
  void* handle = nullptr;
  for (const char* name : {"libdnnl.so.2", "libdnnl.so"})
    if (!handle) handle = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  if (!handle) {
    lib.unavailable_reason = "libdnnl.so.2 can't be opened (Debian: libdnnl2)";
    return lib;
  }
  std::string missing;
#define FULMEN_ONEDNN_LOAD(name)                                              \
  lib.name = reinterpret_cast<decltype(lib.name)>(dlsym(handle, #name));      \
  if (!lib.name && missing.empty()) missing = #name;
  FULMEN_ONEDNN_FUNCTIONS(FULMEN_ONEDNN_LOAD)
#undef FULMEN_ONEDNN_LOAD
  if (!missing.empty()) {
    lib.unavailable_reason = "libdnnl has no function " + missing + ", version 2 is needed";
    return lib;
  }
  const dnnl_version_t& version = *lib.dnnl_version();
  lib.version = std::to_string(version.major) + "." + std::to_string(version.minor) + "." + std::to_string(version.patch);
  if (version.major != DNNL_VERSION_MAJOR) {
    lib.unavailable_reason = "libdnnl is version " + lib.version + ", Fulmen was built for " + std::to_string(DNNL_VERSION_MAJOR) + ".x";
    return lib;
  }
  lib.omp_set_num_threads = reinterpret_cast<void (*)(int)>(dlsym(handle, "omp_set_num_threads"));
  lib.omp_get_max_threads = reinterpret_cast<int (*)()>(dlsym(handle, "omp_get_max_threads"));
  if (lib.dnnl_engine_create(&lib.engine, dnnl_cpu, 0) != dnnl_success) lib.unavailable_reason = "libdnnl can't make a CPU engine";
  return lib;
}

const char* status_name(dnnl_status_t status) {
  switch (status) {
    case dnnl_success: return "success";
    case dnnl_out_of_memory: return "out of memory";
    case dnnl_invalid_arguments: return "invalid arguments";
    case dnnl_unimplemented: return "unimplemented";
    case dnnl_iterator_ends: return "no implementation left";
    case dnnl_runtime_error: return "runtime error";
    case dnnl_not_required: return "not required";
  }
  return "unknown status";
}

}  // namespace

const Library& library() {
  static const Library* lib = new Library(open_library());  // used until the process ends
  return *lib;
}

void check(dnnl_status_t status, const char* call) {
  if (status != dnnl_success) throw DeviceError(std::string("onednn: ") + call + ": " + status_name(status));
}

SingleThread::SingleThread() {
  const Library& lib = library();
  if (!lib.omp_set_num_threads || !lib.omp_get_max_threads) return;
  before_ = lib.omp_get_max_threads();
  if (before_ != 1) lib.omp_set_num_threads(1);
}

SingleThread::~SingleThread() {
  const Library& lib = library();
  if (lib.omp_set_num_threads && before_ != 1) lib.omp_set_num_threads(before_);
}

}  // namespace fulmen::onednn
