// The extension module `fulmen._core`.
#include "bindings.h"

namespace fulmen {
void bind_tracing(nanobind::module_& m);
}

NB_MODULE(_core, m) {
  m.doc() = "Fulmen's C++ core; use the package fulmen";
  nanobind::set_leak_warnings(false);  // executors written in Python live as long as the process
  fulmen::python::bind_errors(m);
  fulmen::python::bind_types(m);
  fulmen::python::bind_executors(m);
  fulmen::python::bind_python_executor(m);
  fulmen::python::bind_claims(m);
  fulmen::python::bind_compile(m);
  fulmen::python::bind_autograd(m);
  fulmen::python::bind_program_call(m);
  fulmen::python::bind_sdpa(m);
  fulmen::python::bind_replay(m);
  fulmen::python::bind_testing(m);
  fulmen::bind_tracing(m);
}
