// The parts of the extension module `fulmen._core`, one function a file. Users never see `_core`: python/fulmen wraps it.
#pragma once

#include <nanobind/nanobind.h>

#include <string>
#include <vector>

#include "executors/executor.h"

namespace fulmen::python {

namespace nb = nanobind;

void bind_errors(nb::module_& m);     // errors.cpp: the exception classes
void bind_types(nb::module_& m);      // types.cpp: TensorType, Trace, the op catalogue
void bind_executors(nb::module_& m);  // executors.cpp: Executor, Target, default list
void bind_python_executor(nb::module_& m);  // python_executor.cpp: executors written in Python
void bind_claims(nb::module_& m);     // claims.cpp: Answer, claims of one call
void bind_compile(nb::module_& m);    // compile.cpp: compile(), Compiled
void bind_replay(nb::module_& m);     // replay.cpp: traces as files
void bind_autograd(nb::module_& m);   // autograd.cpp: the two directions of a torch.autograd.Function
void bind_testing(nb::module_& m);    // testing.cpp: the conformance suite of executors
void bind_program_call(nb::module_& m);  // program_call.cpp: a compiled graph as Dynamo's code calls it
void bind_sdpa(nb::module_& m);       // sdpa.cpp: attention's own entry

// In a catch block of a C function that Python calls: makes the exception Python's. Null, to be returned.
PyObject* raise_python();

// An executor as Python holds it.
struct ExecutorHandle {
  std::shared_ptr<const Executor> executor;
};

// The default list, made once.
const ExecutorList& default_list();

// None: the default list; else a list of Executor.
ExecutorList executors_of(nb::handle executors);

// None: from the device ("cpu" if it is none); else a name or a Target.
Target target_of(nb::handle target, Device device = {});

// One answer to a claim, or one refusal of a compiled node.
struct Answer {
  std::string executor;
  bool claimed = false;
  std::string code, reason;  // of a refusal
  std::string forward_kernel, backward_kernel;
  size_t forward_workspace_bytes = 0, backward_workspace_bytes = 0;
  bool has_backward = false;
  bool deterministic = false;
  std::vector<std::string> layout_wishes, steps;
};

}  // namespace fulmen::python
