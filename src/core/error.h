// The five kinds of error. Each is a Python exception class too (fulmen.ShapeError, ...).
// Messages are lower case and say: op, argument, what was found, what is needed.
#pragma once

#include <stdexcept>
#include <string>
#include <vector>

namespace fulmen {

class Error : public std::runtime_error {
  using std::runtime_error::runtime_error;
};
// A shape, size, axis or stride that the op cannot take. ValueError in Python.
class ShapeError : public Error {
  using Error::Error;
};
// A dtype, device or argument type that the op cannot take. TypeError in Python.
class TypeError : public Error {
  using Error::Error;
};
// A right call that nobody in the executor list claims. NotImplementedError in Python.
class UnsupportedError : public Error {
 public:
  using Error::Error;
  // What each executor answered, in list order; empty where nobody was asked.
  struct Answer {
    std::string executor, code, reason;
  };
  std::vector<Answer> refusals;
};
// A library or device call failed. RuntimeError in Python.
class DeviceError : public Error {
  using Error::Error;
};
// Our own mistake; please report it with the trace file that the message names.
class InternalError : public Error {
  using Error::Error;
};

[[noreturn]] inline void internal_failure(const char* condition, const char* file, int line) {
  throw InternalError(std::string("internal: ") + condition + " does not hold at " + file + ":" + std::to_string(line));
}

}  // namespace fulmen

// Our own invariants; never for user input.
#define FULMEN_CHECK(condition) \
  ((condition) ? static_cast<void>(0) : ::fulmen::internal_failure(#condition, __FILE__, __LINE__))
