#include "ir/trace.h"

#include <unordered_set>

namespace fulmen {
namespace {

bool name_taken(const Trace& trace, std::string_view name) {
  for (const Value& value : trace.values)
    if (value.name == name) return true;
  return false;
}

}  // namespace

ValueId Trace::add_value(TensorType type, std::string_view wanted) {
  const auto id = static_cast<ValueId>(values.size());
  // Fresh names are t<id>; given ones are compared, since a program has few of them.
  std::string chosen;
  if (wanted.empty()) {
    chosen = "t" + std::to_string(id);
  } else {
    chosen = wanted;
    for (char& c : chosen)
      if (!isalnum(static_cast<unsigned char>(c)) && c != '_') c = '_';
    if (isdigit(static_cast<unsigned char>(chosen[0]))) chosen.insert(0, "v");
    const bool looks_fresh = chosen.size() > 1 && chosen[0] == 't' && isdigit(static_cast<unsigned char>(chosen[1]));
    if (looks_fresh || name_taken(*this, chosen)) chosen += "_" + std::to_string(id);
  }
  values.push_back({std::move(type), std::move(chosen)});
  return id;
}

ValueId Trace::add_input(TensorType type, std::string_view name) {
  const ValueId id = add_value(std::move(type), name);
  inputs.push_back(id);
  return id;
}

std::vector<int> producers(const Trace& trace) {
  std::vector<int> producer(trace.values.size(), -1);
  for (size_t i = 0; i < trace.nodes.size(); ++i)
    for (ValueId id : trace.nodes[i].outputs)
      if (id != no_value) producer[static_cast<size_t>(id)] = static_cast<int>(i);
  return producer;
}

std::vector<int> use_counts(const Trace& trace) {
  std::vector<int> uses(trace.values.size(), 0);
  for (const Node& node : trace.nodes)
    for (ValueId id : node.inputs)
      if (id != no_value) ++uses[static_cast<size_t>(id)];
  for (ValueId id : trace.outputs)
    if (id != no_value) ++uses[static_cast<size_t>(id)];
  return uses;
}

}  // namespace fulmen
