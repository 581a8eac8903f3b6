// The five kinds of error as Python classes: fulmen.Error and its subclasses, each also the Python class that code
// outside would expect (ValueError, TypeError, NotImplementedError, RuntimeError).
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <new>

#include "bindings.h"
#include "core/error.h"
#include "driver/audit.h"
#include "driver/revocation.h"

namespace fulmen::python {
namespace {

struct ErrorClasses {
  PyObject *base, *shape, *type, *unsupported, *device, *internal;
};

ErrorClasses& classes() {
  static ErrorClasses instance{};
  return instance;
}

PyObject* make_class(nb::module_& m, const char* name, const char* doc, PyObject* first, PyObject* second = nullptr) {
  nb::object bases = second ? nb::object(nb::make_tuple(nb::borrow(first), nb::borrow(second))) : nb::object(nb::borrow(first));
  const std::string full = std::string("fulmen.") + name;
  PyObject* made = PyErr_NewExceptionWithDoc(full.c_str(), doc, bases.ptr(), nullptr);
  if (!made) throw nb::python_error();
  m.attr(name) = nb::borrow(made);
  return made;
}

void set_unsupported(const UnsupportedError& error) {
  nb::object instance = nb::borrow(classes().unsupported)(nb::str(error.what()));
  nb::list refusals;
  for (const UnsupportedError::Answer& refusal : error.refusals) {
    Answer answer;
    answer.executor = refusal.executor;
    answer.code = refusal.code;
    answer.reason = refusal.reason;
    refusals.append(nb::cast(answer));
  }
  instance.attr("refusals") = refusals;
  PyErr_SetObject(classes().unsupported, instance.ptr());
}

void translate(const std::exception_ptr& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (const UnsupportedError& error) {
    set_unsupported(error);
  } catch (const ShapeError& error) {
    PyErr_SetString(classes().shape, error.what());
  } catch (const fulmen::TypeError& error) {
    PyErr_SetString(classes().type, error.what());
  } catch (const DeviceError& error) {
    PyErr_SetString(classes().device, error.what());
  } catch (const InternalError& error) {
    PyErr_SetString(classes().internal, error.what());
  } catch (const Error& error) {
    PyErr_SetString(classes().base, error.what());
  }
}

}  // namespace

PyObject* raise_python() {
  try {
    throw;
  } catch (nb::python_error& error) {
    error.restore();
  } catch (const Error&) {
    translate(std::current_exception(), nullptr);
  } catch (const std::bad_alloc& error) {
    PyErr_SetString(PyExc_MemoryError, error.what());
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

void bind_errors(nb::module_& m) {
  ErrorClasses& c = classes();
  c.base = make_class(m, "Error", "What Fulmen raises; its subclasses say which kind.", PyExc_Exception);
  c.shape = make_class(m, "ShapeError", "A shape, size, axis or stride that the op cannot take.", c.base, PyExc_ValueError);
  c.type = make_class(m, "TypeError", "A dtype, device or argument type that the op cannot take.", c.base, PyExc_TypeError);
  c.unsupported = make_class(m, "UnsupportedError",
                             "A right call that no executor of the list claims; .refusals says what each answered.", c.base,
                             PyExc_NotImplementedError);
  nb::borrow(c.unsupported).attr("refusals") = nb::tuple();
  c.device = make_class(m, "DeviceError", "A library or device call failed.", c.base, PyExc_RuntimeError);
  c.internal = make_class(m, "InternalError", "A mistake of Fulmen itself; please report it.", c.base, PyExc_RuntimeError);
  nb::register_exception_translator(translate);
  // Warnings of the core (a claim that was revoked) become Python warnings.
  set_warning_handler([](const std::string& message) {
    nb::gil_scoped_acquire locked;
    if (PyErr_WarnEx(PyExc_RuntimeWarning, message.c_str(), 1) != 0) PyErr_WriteUnraisable(nullptr);
  });
  m.def("revocation_count", revocation_count);
  m.def("set_audit", set_audit);
  m.def("audit_counts", [] {
    const AuditCounts counts = audit_counts();
    return nb::make_tuple(counts.checked, counts.differing, counts.left_out);
  });
}

}  // namespace fulmen::python
