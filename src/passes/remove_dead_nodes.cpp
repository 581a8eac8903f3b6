#include "passes/remove_dead_nodes.h"

#include <algorithm>

namespace fulmen {

Trace remove_dead_nodes(const Trace& trace) {
  std::vector<bool> live(trace.values.size(), false);
  const auto mark = [&](ValueId id) {
    if (id != no_value) live[static_cast<size_t>(id)] = true;
  };
  for (ValueId id : trace.outputs) mark(id);
  std::vector<bool> keep(trace.nodes.size(), false);
  for (size_t i = trace.nodes.size(); i-- > 0;) {
    const Node& node = trace.nodes[i];
    keep[i] = std::any_of(node.outputs.begin(), node.outputs.end(),
                          [&](ValueId id) { return id != no_value && live[static_cast<size_t>(id)]; });
    if (keep[i])
      for (ValueId id : node.inputs) mark(id);
  }
  Trace out = trace;
  out.nodes.clear();
  for (size_t i = 0; i < trace.nodes.size(); ++i)
    if (keep[i]) out.nodes.push_back(trace.nodes[i]);
  return out;
}

}  // namespace fulmen
