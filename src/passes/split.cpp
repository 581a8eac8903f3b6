#include "passes/split.h"

#include <algorithm>
#include <limits>
#include <unordered_set>

#include "passes/minimum_cut.h"
#include "passes/remove_dead_nodes.h"

namespace fulmen {
namespace {

// Nodes whose second run would cost more than keeping their results.
bool is_costly(const Node& node) {
  static const std::unordered_set<std::string_view> costly = {
      "matmul", "linear", "addmm", "sdpa_forward", "sdpa_backward", "convolution", "convolution_input_grad", "convolution_weight_grad",
      "embedding", "embedding_grad", "gather", "index_select", "index", "scatter", "scatter_add", "index_add", "index_put", "sort",
      "topk", "cumsum", "cumprod", "einsum", "cross_entropy"};
  return costly.count(node.op->name) > 0;
}

bool is_view(const Node& node) {
  static const std::unordered_set<std::string_view> views = {"reshape", "permute", "slice", "broadcast_to", "detach"};
  return views.count(node.op->name) > 0;
}

// Nodes that are computed again move to just before their first reader, so that their results live briefly.
std::vector<Node> recompute_late(std::vector<Node> nodes, const std::vector<bool>& is_backward, size_t value_count) {
  std::vector<int> producer(value_count, -1);
  for (size_t i = 0; i < nodes.size(); ++i)
    for (ValueId id : nodes[i].outputs)
      if (id != no_value) producer[static_cast<size_t>(id)] = static_cast<int>(i);
  std::vector<Node> ordered;
  std::vector<bool> placed(nodes.size(), false);
  std::vector<size_t> stack;
  const auto place = [&](size_t wanted) {
    stack.push_back(wanted);
    while (!stack.empty()) {
      const size_t i = stack.back();
      bool ready = true;
      for (ValueId id : nodes[i].inputs) {
        if (id == no_value) continue;
        const int from = producer[static_cast<size_t>(id)];
        if (from < 0 || placed[static_cast<size_t>(from)]) continue;
        stack.push_back(static_cast<size_t>(from));
        ready = false;
      }
      if (!ready) continue;
      stack.pop_back();
      if (placed[i]) continue;
      placed[i] = true;
      ordered.push_back(std::move(nodes[i]));
    }
  };
  for (size_t i = 0; i < nodes.size(); ++i)
    if (is_backward[i] && !placed[i]) place(i);
  for (size_t i = 0; i < nodes.size(); ++i)
    if (!placed[i]) place(i);  // results that depend on no gradient
  return ordered;
}

}  // namespace

SplitTrace split(const JointTrace& joint) {
  const Trace& all = joint.trace;
  const size_t value_count = all.values.size();
  const auto at = [](ValueId id) { return static_cast<size_t>(id); };

  // Which values depend on an output's gradient: those are the backward's own.
  std::vector<bool> depends_on_grad(value_count, false);
  for (size_t i = static_cast<size_t>(joint.input_count); i < all.inputs.size(); ++i) depends_on_grad[at(all.inputs[i])] = true;
  std::vector<bool> node_is_backward(all.nodes.size(), false);
  for (size_t i = 0; i < all.nodes.size(); ++i) {
    const Node& node = all.nodes[i];
    node_is_backward[i] = std::any_of(node.inputs.begin(), node.inputs.end(), [&](ValueId id) { return id != no_value && depends_on_grad[at(id)]; });
    for (ValueId id : node.outputs)
      if (id != no_value) depends_on_grad[at(id)] = node_is_backward[i];
  }

  // The cut: two vertices a value (in, out), joined by an edge of its bytes.
  constexpr int64_t endless = std::numeric_limits<int64_t>::max() / 4;
  MinimumCut graph(static_cast<int>(2 * value_count + 2));
  const int source = static_cast<int>(2 * value_count), sink = source + 1;
  const auto in_vertex = [](ValueId id) { return 2 * id; };
  const auto out_vertex = [](ValueId id) { return 2 * id + 1; };
  std::vector<bool> needed_by_backward(value_count, false);
  std::vector<bool> is_input(value_count, false), view_result(value_count, false);
  for (int i = 0; i < joint.input_count; ++i) is_input[at(all.inputs[static_cast<size_t>(i)])] = true;
  for (size_t i = 0; i < all.nodes.size(); ++i) {
    const Node& node = all.nodes[i];
    if (node_is_backward[i]) {
      for (ValueId id : node.inputs)
        if (id != no_value && !depends_on_grad[at(id)]) needed_by_backward[at(id)] = true;
      continue;
    }
    const bool view = is_view(node);
    for (ValueId result : node.outputs) {
      if (result == no_value) continue;
      view_result[at(result)] = view;
      if (is_costly(node)) {
        graph.add_edge(source, in_vertex(result), endless);
      } else {
        for (ValueId id : node.inputs)
          if (id != no_value) graph.add_edge(out_vertex(id), in_vertex(result), endless);
      }
    }
  }
  // A gradient that is itself no backward value (a constant, say) belongs to the backward all the same.
  for (size_t i = static_cast<size_t>(joint.output_count); i < all.outputs.size(); ++i)
    if (!depends_on_grad[at(all.outputs[i])]) needed_by_backward[at(all.outputs[i])] = true;
  for (size_t v = 0; v < value_count; ++v) {
    const auto id = static_cast<ValueId>(v);
    if (depends_on_grad[v]) continue;
    if (is_input[v]) {
      graph.add_edge(source, in_vertex(id), endless);
      graph.add_edge(in_vertex(id), out_vertex(id), 1);
    } else {
      const int64_t bytes = static_cast<int64_t>(all.type(id).bytes());
      graph.add_edge(in_vertex(id), out_vertex(id), view_result[v] ? endless / 2 : bytes + 64);
    }
    if (needed_by_backward[v]) graph.add_edge(out_vertex(id), sink, endless);
  }
  const std::vector<bool> source_side = graph.solve(source, sink);

  std::vector<bool> saved(value_count, false);
  for (size_t v = 0; v < value_count; ++v)
    saved[v] = !depends_on_grad[v] && source_side[static_cast<size_t>(in_vertex(static_cast<ValueId>(v)))] &&
               !source_side[static_cast<size_t>(out_vertex(static_cast<ValueId>(v)))];

  SplitTrace result;
  result.output_count = joint.output_count;
  result.forward = all;
  result.forward.name = all.name;
  result.forward.inputs.resize(static_cast<size_t>(joint.input_count));
  result.forward.outputs.resize(static_cast<size_t>(joint.output_count));
  result.forward.nodes.clear();
  result.backward = all;
  result.backward.name = all.name + "_backward";
  result.backward.inputs.clear();
  result.backward.outputs.assign(all.outputs.begin() + joint.output_count, all.outputs.end());

  for (size_t i = 0; i < all.nodes.size(); ++i)
    if (!node_is_backward[i]) result.forward.nodes.push_back(all.nodes[i]);

  // The backward starts from the saved values; a node whose results are all saved needn't run again. Walk from the
  // outputs to find what it really needs.
  std::vector<bool> wanted(value_count, false);
  for (ValueId id : result.backward.outputs) wanted[at(id)] = true;
  std::vector<Node> kept;
  std::vector<bool> kept_is_backward;
  for (size_t i = all.nodes.size(); i-- > 0;) {
    Node node = all.nodes[i];
    bool run = false;
    for (ValueId& id : node.outputs) {
      if (id == no_value) continue;
      if (saved[at(id)])
        id = no_value;  // comes from the forward
      else
        run |= wanted[at(id)];
    }
    if (!run) continue;
    for (ValueId id : node.inputs)
      if (id != no_value) wanted[at(id)] = true;
    kept.push_back(std::move(node));
    kept_is_backward.push_back(node_is_backward[i]);
  }
  std::reverse(kept.begin(), kept.end());
  std::reverse(kept_is_backward.begin(), kept_is_backward.end());
  result.backward.nodes = recompute_late(std::move(kept), kept_is_backward, value_count);

  for (int i = 0; i < joint.input_count; ++i) {
    const ValueId id = all.inputs[static_cast<size_t>(i)];
    if (!wanted[at(id)]) continue;
    result.saved_inputs.push_back(i);
    result.backward.inputs.push_back(id);
  }
  for (size_t v = 0; v < value_count; ++v) {
    const auto id = static_cast<ValueId>(v);
    if (!saved[v] || is_input[v] || !wanted[v]) continue;
    result.backward.inputs.push_back(id);
    result.forward.outputs.push_back(id);
    result.saved_bytes += all.type(id).bytes();
  }
  result.backward.inputs.insert(result.backward.inputs.end(), all.inputs.begin() + joint.input_count, all.inputs.end());
  result.forward = remove_dead_nodes(result.forward);
  return result;
}

}  // namespace fulmen
