#include "passes/merge_equal_nodes.h"

#include <unordered_map>

#include "passes/substitution.h"

namespace fulmen {
namespace {

std::string key_of(const Node& node) {
  std::string key = node.op->name;
  for (ValueId id : node.inputs) key += ',' + std::to_string(id);
  for (const auto& [name, value] : node.attrs) key += ';' + name + '=' + to_string(value);
  if (!node.executor.empty()) key += '@' + node.executor;
  return key;
}

}  // namespace

Trace merge_equal_nodes(const Trace& trace) {
  Trace out = trace;
  out.nodes.clear();
  Substitution substitution;
  std::unordered_map<std::string, size_t> seen;
  for (Node node : trace.nodes) {
    substitution.apply(node.inputs);
    if (node.body) {  // fusions are made last and are never equal in practice
      out.nodes.push_back(std::move(node));
      continue;
    }
    const auto [at, is_new] = seen.emplace(key_of(node), out.nodes.size());
    if (is_new) {
      out.nodes.push_back(std::move(node));
      continue;
    }
    Node& first = out.nodes[at->second];
    for (size_t i = 0; i < node.outputs.size(); ++i) {
      if (node.outputs[i] == no_value) continue;
      if (first.outputs[i] == no_value)
        first.outputs[i] = node.outputs[i];
      else
        substitution.replace(node.outputs[i], first.outputs[i]);
    }
  }
  substitution.apply(out.outputs);
  return out;
}

}  // namespace fulmen
