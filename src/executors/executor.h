// The interface an executor implements. A claim is one value: a Plan, which is what will run, or a Refusal. Claims are
// asked by claiming/, once a call; what was accepted is what runs.
//
// To add an executor: one folder here with a factory function, one line in default_list.cpp. Vendor headers stay in
// the folder; executors never include each other.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "ops/op_def.h"
#include "runtime/kernel.h"
#include "runtime/target.h"

namespace fulmen {

// "Cannot" and "not worth it" differ: forcing an executor overrides only not_worth_it.
enum class RefusalCode {
  unavailable,            // library, driver or device is not there, or too old
  prerequisite_missing,   // a library answered that something it loads is missing
  not_implemented,        // this executor doesn't run this op
  wrong_device,
  wrong_dtype,
  wrong_shape,
  wrong_layout,
  degenerate,             // zero sizes and the like, kept away from libraries
  too_large,              // an element-count or workspace rule
  unsupported_argument,   // a mask form, dropout, window, ... that this executor doesn't take
  forward_unsupported,    // the library refused the forward
  backward_unsupported,   // the library refused the backward, or there is none
  not_deterministic,
  known_fault,            // a row of the known-fault table
  not_worth_it,
  revoked,                // failed at run time, or an audit found it wrong
};
std::string_view code_name(RefusalCode code);

struct Refusal {
  RefusalCode code;
  std::string reason;  // "sdpa: head_dim is 100, cudnn needs a multiple of 8"
};

struct PlanDirection {
  std::string kernel;  // a name a person can search for
  size_t workspace_bytes = 0;
};

struct Plan {
  PlanDirection forward;
  std::optional<PlanDirection> backward;  // only when claimed for training as a pair
  bool deterministic = true;
  std::vector<std::string> layout_wishes;  // "query: (batch, length, heads, dim)", for what the compiler itself makes
  std::vector<std::string> steps;          // visible conversions, "bool mask -> additive"
  std::shared_ptr<const void> data;        // the executor's own
};

using Claim = std::variant<Plan, Refusal>;

inline bool is_claimed(const Claim& claim) { return std::holds_alternative<Plan>(claim); }

// One call as it is claimed and as its kernel is made. For a fusion, `body` is its trace.
struct Call {
  const OpDef* op = nullptr;
  std::vector<const TensorType*> inputs;  // null where absent
  std::vector<const TensorType*> outputs;  // null where a result isn't wanted
  const Attributes* attrs = nullptr;
  const Trace* body = nullptr;
  bool training = false;       // claim the pair; else the forward alone
  bool deterministic = false;
};

Call call_of(const Trace& trace, const Node& node, bool training = false);

class Executor {
 public:
  virtual ~Executor() = default;
  virtual std::string_view name() const = 0;
  virtual std::string_view doc() const = 0;
  // Empty if it can be used here; else the reason. A described target doesn't need the device.
  virtual std::string unavailable_reason() const { return {}; }
  virtual std::string version() const { return {}; }

  virtual Claim claim(const Call& call, const Target& target) const = 0;

  // May this call be a part of a fusion that this executor would claim? Asked by the fuse pass.
  virtual bool can_fuse(const Call&, const Target&) const { return false; }

  // Kernels of a call claimed with `plan`. The call's op tells the direction: sdpa_forward, sdpa_backward.
  virtual std::unique_ptr<Kernel> make_kernel(const Call& call, const Plan& plan, const Target& target) const = 0;
};

using ExecutorList = std::vector<std::shared_ptr<const Executor>>;

}  // namespace fulmen
