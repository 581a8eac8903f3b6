// A Python exception is already set: thrown by code that calls Python's C functions, turned back into it at the border.
#pragma once

#include <nanobind/nanobind.h>

namespace fulmen::python {

// nanobind's exception takes the pending Python exception with it and restores it at the border.
using PythonError = nanobind::python_error;

}  // namespace fulmen::python
