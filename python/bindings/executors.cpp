// Executors and targets as Python sees them.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <filesystem>

#include "bindings.h"
#include "claiming/targets.h"
#include "core/error.h"
#include "core/parallel.h"
#include "executors/default_list.h"
#include "runtime/counters.h"

namespace fulmen::python {

namespace {

// The folders of the vendor libraries that pip installed beside PyTorch (nvidia/cudnn/lib, nvidia/cu13/lib, ...), found
// without importing anything.
std::vector<std::string> vendor_library_folders() {
  std::vector<std::string> folders;
  const nb::object spec = nb::module_::import_("importlib.util").attr("find_spec")("nvidia");
  if (spec.is_none() || spec.attr("submodule_search_locations").is_none()) return folders;
  for (nb::handle location : spec.attr("submodule_search_locations"))
    for (const auto& entry : std::filesystem::directory_iterator(nb::cast<std::string>(nb::str(location)))) {
      const auto lib = entry.path() / "lib";
      std::error_code ignored;
      if (std::filesystem::is_directory(lib, ignored)) folders.push_back(lib.string());
    }
  return folders;
}

}  // namespace

const ExecutorList& default_list() {
  // Looking for folders runs Python code, in which another thread may get the GIL and come here too: the guard of a
  // static with an initialiser would then wait for a thread that waits for the GIL. The first to finish wins.
  static std::atomic<const ExecutorList*> list{nullptr};
  if (const ExecutorList* made = list.load(std::memory_order_acquire)) return *made;
  auto mine = std::make_unique<const ExecutorList>(default_executors(vendor_library_folders()));
  const ExecutorList* none = nullptr;
  if (list.compare_exchange_strong(none, mine.get(), std::memory_order_acq_rel)) return *mine.release();
  return *none;
}

ExecutorList executors_of(nb::handle executors) {
  if (executors.is_none()) return default_list();
  ExecutorList list;
  for (nb::handle item : executors) {
    if (!nb::isinstance<ExecutorHandle>(item))
      throw TypeError(std::string("executors: an Executor is needed, found ") + Py_TYPE(item.ptr())->tp_name);
    list.push_back(nb::cast<ExecutorHandle&>(item).executor);
  }
  return list;
}

Target target_of(nb::handle target, Device device) {
  if (target.is_none()) {
    if (device.kind == DeviceKind::cuda) return find_target("cuda:" + std::to_string(device.index));
    return cpu_target();
  }
  if (nb::isinstance<nb::str>(target)) return find_target(nb::cast<std::string>(target));
  if (nb::isinstance<Target>(target)) return nb::cast<Target&>(target);
  throw TypeError(std::string("target: a name or a Target is needed, found ") + Py_TYPE(target.ptr())->tp_name);
}

void bind_executors(nb::module_& m) {
  nb::class_<ExecutorHandle>(m, "Executor", "Something that runs ops on a target")
      .def_prop_ro("name", [](const ExecutorHandle& h) { return std::string(h.executor->name()); })
      .def_prop_ro("doc", [](const ExecutorHandle& h) { return std::string(h.executor->doc()); })
      .def_prop_ro("version", [](const ExecutorHandle& h) { return h.executor->version(); })
      .def_prop_ro("unavailable_reason", [](const ExecutorHandle& h) { return h.executor->unavailable_reason(); })
      .def_prop_ro("counters", [](const ExecutorHandle& h) {
        nb::dict counts;
        if (const auto* counting = dynamic_cast<const Counting*>(h.executor.get()))
          for (const auto& [name, value] : counting->counters()) counts[name.c_str()] = value;
        return counts;
      })
      .def_prop_ro("available", [](const ExecutorHandle& h) { return h.executor->unavailable_reason().empty(); })
      .def("__repr__", [](const ExecutorHandle& h) {
        const std::string reason = h.executor->unavailable_reason();
        return "<fulmen executor " + std::string(h.executor->name()) + (reason.empty() ? ">" : ": not available, " + reason + ">");
      });
  m.def("default_executors", [] {
    std::vector<ExecutorHandle> handles;
    for (const auto& executor : default_list()) handles.push_back({executor});
    return handles;
  });

  nb::class_<Target>(m, "Target", "What code is compiled for")
      .def_ro("name", &Target::name)
      .def_prop_ro("kind", [](const Target& t) { return t.kind == DeviceKind::cuda ? "cuda" : "cpu"; })
      .def_ro("described", &Target::described)
      .def_ro("derived", &Target::derived)
      .def_ro("compute_capability", &Target::compute_capability)
      .def_ro("description", &Target::description)
      .def_prop_ro("device_name", [](const Target& t) { return device_name(t); })
      .def("__repr__", [](const Target& t) { return "<fulmen target " + t.name + ">"; });
  m.def("known_targets", known_targets);
  m.def("find_target", [](const std::string& name) { return find_target(name); });
  m.def("save_target", [](const Target& target, const std::string& path) { save_target(target, path); });

  m.def("thread_count", thread_count);
  m.def("thread_backend", thread_backend);
  m.def("rescan_openmp_runtime", rescan_openmp_runtime);
}

}  // namespace fulmen::python
