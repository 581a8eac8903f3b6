// The conformance suite of executors: does one keep what it promises? Every good sample of the op catalogue is offered to
// it, in several layouts and dtypes. What it claims is run on the CPU, on memory with canaries, and compared with the
// float64 evaluator; what it refuses must say why. Programs that differentiate the samples follow.
//
// Nothing here knows any executor's name, and nothing is printed: a fault is a value. fulmen.testing is the Python side.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "executors/executor.h"

namespace fulmen::conformance {

struct CheckOptions {
  // Dtypes that f32 operands are replaced by, beside the sample as it is written.
  std::vector<DType> dtypes{DType::bf16, DType::f16, DType::f64};
  Target target;
  bool layouts = true;    // rows with gaps, columns first, stride 0
  bool gradients = true;  // the programs that differentiate the samples
};

// The promises, by the names that faults carry:
//   claim     asked twice it answers the same; it answers with a value, whatever the call; a claim names its kernel; a
//             claim for training brings the backward; with `deterministic` asked for, the plan is deterministic
//   refusal   one line that starts with the op's name
//   run       what is claimed runs
//   numbers   within twice the reference's error in that dtype, or 4 ulp of the largest element
//   memory    only elements of the results are written
//   inputs    operands are left as they are
//   repeat    a kernel that calls itself deterministic gives the same bits again, from another thread too
//   gradient  numbers of the gradients of programs in which it runs whatever it claims
struct Fault {
  std::string promise;
  std::string call;     // "matmul/plain (bf16, row gaps)"
  std::string text;     // what was found
  std::string program;  // the trace; `fulmen run` takes it
};

struct Report {
  int64_t calls = 0;    // forms of samples that were offered
  int64_t claimed = 0;
  int64_t gradients = 0;  // programs compared in which it ran something
  std::vector<std::pair<std::string, int64_t>> refusals;  // code, how often
  std::vector<Fault> faults;

  void join(const Report& other);
};

// All samples of one op.
Report check_op(const std::shared_ptr<const Executor>& executor, const OpDef& op, const CheckOptions& options = {});

// All samples of all ops. Executors written in Python need the lock of their interpreter to be free.
Report check_executor(const std::shared_ptr<const Executor>& executor, const CheckOptions& options = {});

}  // namespace fulmen::conformance
