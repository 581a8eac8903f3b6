#include "executors/cudnn/library.h"

#include <dlfcn.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <vector>

// The stand-in's bytes (stand_in.cmake makes it, cudnn.cmake embeds it).
extern "C" {
extern const unsigned char fulmen_driver_stand_in[];
extern const unsigned char fulmen_driver_stand_in_end[];
}

namespace fulmen::cudnn {

namespace {

constexpr const char* soname = "libcudnn.so.9";

bool is_folder(const std::string& path) {
  struct stat info {};
  return stat(path.c_str(), &info) == 0 && S_ISDIR(info.st_mode);
}

bool exists(const std::string& path) { return access(path.c_str(), R_OK) == 0; }

// Libraries that cuDNN and its frontend look for by name: opened from beside cuDNN if the loader doesn't find them.
void open_companions(const std::string& cudnn_path) {
  std::string folder = cudnn_path.substr(0, cudnn_path.find_last_of('/') + 1);
  const std::vector<std::string> folders{folder,
                                         folder + "../../cu13/lib/",
                                         folder + "../../cuda_runtime/lib/",
                                         folder + "../../cuda_nvrtc/lib/",
                                         "/usr/local/cuda/lib64/"};
  for (const auto& names : {std::vector<std::string>{"libcudart.so.13", "libcudart.so.12"},
                            std::vector<std::string>{"libnvrtc.so.13", "libnvrtc.so.12"}}) {
    bool open = false;
    for (const std::string& name : names) open = open || dlopen(name.c_str(), RTLD_NOW | RTLD_NOLOAD) != nullptr;
    for (const std::string& place : folders)
      for (const std::string& name : names)
        if (!open && exists(place + name)) open = dlopen((place + name).c_str(), RTLD_NOW | RTLD_GLOBAL) != nullptr;
    for (const std::string& name : names)
      if (!open) open = dlopen(name.c_str(), RTLD_NOW | RTLD_GLOBAL) != nullptr;
  }
}

Library open_first(const Options& options) {
  Library library;
  std::string errors;
  const auto attempt = [&](const std::string& path, const char* found, int flags) {
    if (library.handle) return;
    library.handle = dlopen(path.c_str(), flags);
    if (library.handle) {
      library.path = path;
      library.found = found;
    } else if (const char* error = dlerror(); error && !(flags & RTLD_NOLOAD)) {
      errors += (errors.empty() ? "" : "; ") + std::string(error);
    }
  };
  const int flags = RTLD_NOW | RTLD_LOCAL;
  if (!options.library.empty()) {
    const std::string path = is_folder(options.library) ? options.library + "/" + soname : options.library;
    attempt(path, "FULMEN_CUDNN_LIBRARY", flags);
  } else {
    attempt(soname, "already in the process", flags | RTLD_NOLOAD);
    for (const std::string& folder : options.search_folders)
      if (exists(folder + "/" + soname)) attempt(folder + "/" + soname, "in a search folder", flags);
    attempt(soname, "on the loader's path", flags);
    for (const char* folder : {"/usr/local/cuda/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu"})
      if (exists(std::string(folder) + "/" + soname)) attempt(std::string(folder) + "/" + soname, "the system's", flags);
  }
  if (!library.handle) {
    library.problem = "cudnn: not found (" + errors + ")";
    return library;
  }
  const auto version = reinterpret_cast<size_t (*)()>(dlsym(library.handle, "cudnnGetVersion"));
  const auto cudart = reinterpret_cast<size_t (*)()>(dlsym(library.handle, "cudnnGetCudartVersion"));
  if (!version || !cudart) {
    library.problem = "cudnn: " + library.path + " has no cudnnGetVersion";
    library.handle = nullptr;
    return library;
  }
  Dl_info info{};
  if (dladdr(reinterpret_cast<void*>(version), &info) && info.dli_fname) library.path = info.dli_fname;
  library.version = static_cast<int>(version());
  library.cudart_version = static_cast<int>(cudart());
  if (library.version < version_needed) {
    library.problem = "cudnn: " + library.path + " is version " + version_text(library.version) + ", needed is " +
                      version_text(version_needed) + " (it can be asked for a described device from there on)";
    library.handle = nullptr;
    return library;
  }
  // The parts that answer questions; a half-installed copy lacks some.
  if (!dlsym(library.handle, "cudnnBackendCreateDescriptor")) {
    library.problem = "cudnn: " + library.path + " has no cudnnBackendCreateDescriptor";
    library.handle = nullptr;
    return library;
  }
  const std::string folder = library.path.substr(0, library.path.find_last_of('/') + 1);
  if (!folder.empty())
    for (const char* part : {"libcudnn_graph.so.9", "libcudnn_heuristic.so.9", "libcudnn_engines_runtime_compiled.so.9",
                             "libcudnn_engines_precompiled.so.9"})
      if (!exists(folder + part) && !dlopen(part, RTLD_NOW | RTLD_NOLOAD)) {
        void* elsewhere = dlopen(part, RTLD_NOW | RTLD_LOCAL);
        if (elsewhere) continue;
        library.problem = "cudnn: half installed, " + library.path + " has no " + part + " beside it";
        library.handle = nullptr;
        return library;
      }
  open_companions(library.path);
  return library;
}

}  // namespace

const Library& open_library(const Options& options) {
  static const Library& library = *new Library(open_first(options));
  return library;
}

std::string version_text(int version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

const std::string& ensure_driver_library() {
  static const std::string& outcome = *new std::string([]() -> std::string {
    if (dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL)) return "driver";
    const auto size = static_cast<size_t>(fulmen_driver_stand_in_end - fulmen_driver_stand_in);
    const int file = memfd_create("libcuda.so.1", MFD_CLOEXEC);
    if (file < 0) return "no driver library, and no file in memory for the stand-in";
    for (size_t done = 0; done < size;) {
      const ssize_t count = write(file, fulmen_driver_stand_in + done, size - done);
      if (count <= 0) return "no driver library, and the stand-in could not be written";
      done += static_cast<size_t>(count);
    }
    const std::string path = "/proc/self/fd/" + std::to_string(file);
    // Its soname is libcuda.so.1, so whoever opens that name from now on gets it.
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL);
    const char* error = library ? nullptr : dlerror();
    close(file);
    if (!library) return std::string("no driver library, and the stand-in would not load: ") + (error ? error : "");
    return "stand-in";
  }());
  return outcome;
}

}  // namespace fulmen::cudnn
