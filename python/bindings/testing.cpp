// The conformance suite of executors (conformance/check_executor.h) as fulmen.testing uses it, one op a call.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"
#include "conformance/check_executor.h"
#include "core/error.h"
#include "ops/table.h"

namespace fulmen::python {
namespace {

DType dtype_named(const std::string& name) {
  if (const auto dtype = parse_dtype(name); dtype && is_float(*dtype)) return *dtype;
  throw TypeError("check_executor: '" + name + "' is no float dtype; f64, f32, bf16 and f16 are");
}

nb::dict report_to_python(const conformance::Report& report) {
  nb::dict result, refusals;
  for (const auto& [code, count] : report.refusals) refusals[code.c_str()] = count;
  nb::list faults;
  for (const conformance::Fault& fault : report.faults) faults.append(nb::make_tuple(fault.promise, fault.call, fault.text, fault.program));
  result["calls"] = report.calls;
  result["claimed"] = report.claimed;
  result["gradients"] = report.gradients;
  result["refusals"] = refusals;
  result["faults"] = faults;
  return result;
}

}  // namespace

void bind_testing(nb::module_& m) {
  m.def(
      "check_op",
      [](const ExecutorHandle& handle, const std::string& op, const std::vector<std::string>& dtypes, bool layouts, bool gradients) {
        conformance::CheckOptions options;
        options.dtypes.clear();
        for (const std::string& name : dtypes) options.dtypes.push_back(dtype_named(name));
        options.target = target_of(nb::none());
        options.layouts = layouts;
        options.gradients = gradients;
        conformance::Report report;
        {
          nb::gil_scoped_release unlocked;  // an executor written in Python takes it on any thread
          report = conformance::check_op(handle.executor, require_op(op), options);
        }
        return report_to_python(report);
      },
      nb::arg("executor"), nb::arg("op"), nb::arg("dtypes"), nb::arg("layouts"), nb::arg("gradients"));
}

}  // namespace fulmen::python
