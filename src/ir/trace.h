// The trace: a straight-line program in single assignment. Values are typed; each is a trace input or an output of one
// node; nodes stand in execution order. Plain data: passes take a trace and return a new one. Printing is in print.h,
// reading back in parse.h, the invariants in verify.h.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/tensor_type.h"
#include "ir/attributes.h"

namespace fulmen {

using ValueId = int32_t;
inline constexpr ValueId no_value = -1;  // an optional operand that was not given

// What the trace itself knows of an op; the catalogue's OpDef (ops/op_def.h) derives from it.
struct OpInfo {
  std::string name;
};

struct Value {
  TensorType type;
  std::string name;  // unique in its trace
};

struct Trace;

struct Node {
  const OpInfo* op = nullptr;
  std::vector<ValueId> inputs;  // in the order of the op's operands; no_value where an optional one is absent
  Attributes attrs;
  std::vector<ValueId> outputs;  // no_value where a result isn't wanted
  // Only of op "fusion": the nodes that run as one kernel. Its inputs and outputs are this node's, in order.
  std::shared_ptr<const Trace> body;
  std::string executor;              // who claimed it; empty before claiming
  std::shared_ptr<const void> plan;  // the claim's own data; only its executor reads it
};

struct Trace {
  std::string name = "program";
  std::vector<Value> values;
  std::vector<ValueId> inputs;
  std::vector<Node> nodes;
  std::vector<ValueId> outputs;  // a value may be listed twice, and may be an input; no_value is "none"

  const Value& value(ValueId id) const { return values[static_cast<size_t>(id)]; }
  Value& value(ValueId id) { return values[static_cast<size_t>(id)]; }
  const TensorType& type(ValueId id) const { return value(id).type; }

  // Adds a value; an empty or taken name gets a fresh one.
  ValueId add_value(TensorType type, std::string_view name = {});
  ValueId add_input(TensorType type, std::string_view name = {});
};

// For each value: the index of the node that makes it, -1 for trace inputs.
std::vector<int> producers(const Trace& trace);

// For each value: how many operands and trace outputs read it.
std::vector<int> use_counts(const Trace& trace);

}  // namespace fulmen
