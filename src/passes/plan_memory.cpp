#include "passes/plan_memory.h"

#include <algorithm>

#include "passes/alias_views.h"

namespace fulmen {
namespace {

constexpr int64_t alignment = 64;

int64_t aligned(int64_t bytes) { return (bytes + alignment - 1) / alignment * alignment; }

struct Block {
  int64_t bytes = 0;
  int first = 0, last = 0;  // node indices between which it is alive, both included
  int64_t offset = -1;
};

// Largest first; each block takes the lowest gap among the placed blocks that live at the same time.
int64_t place(std::vector<Block>& blocks) {
  std::vector<size_t> order(blocks.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return blocks[a].bytes > blocks[b].bytes; });
  std::vector<size_t> placed;  // sorted by offset
  int64_t total = 0;
  for (size_t index : order) {
    Block& block = blocks[index];
    int64_t best = -1, best_gap = 0, end = 0;
    for (size_t other_index : placed) {
      const Block& other = blocks[other_index];
      if (other.last < block.first || other.first > block.last) continue;
      const int64_t gap = other.offset - end;
      if (gap >= block.bytes && (best < 0 || gap < best_gap)) {
        best = end;
        best_gap = gap;
      }
      end = std::max(end, other.offset + other.bytes);
    }
    block.offset = best >= 0 ? best : end;
    total = std::max(total, block.offset + block.bytes);
    placed.insert(std::upper_bound(placed.begin(), placed.end(), index,
                                   [&](size_t a, size_t b) { return blocks[a].offset < blocks[b].offset; }),
                  index);
  }
  return total;
}

}  // namespace

MemoryPlan plan_memory(const Trace& trace, const std::vector<size_t>& workspace_bytes) {
  MemoryPlan plan;
  plan.slots.resize(trace.values.size());
  plan.workspace_offsets.resize(trace.nodes.size(), 0);
  std::vector<int> block_of(trace.values.size(), -1);
  std::vector<Block> blocks;
  const auto at = [](ValueId id) { return static_cast<size_t>(id); };

  for (size_t i = 0; i < trace.inputs.size(); ++i) plan.slots[at(trace.inputs[i])] = {Storage::input, static_cast<int>(i), 0};
  for (size_t i = 0; i < trace.outputs.size(); ++i)
    if (trace.outputs[i] != no_value) plan.slots[at(trace.outputs[i])] = {Storage::output, static_cast<int>(i), 0};

  for (size_t n = 0; n < trace.nodes.size(); ++n) {
    const Node& node = trace.nodes[n];
    const int index = static_cast<int>(n);
    if (node.executor == view_executor) {
      const ValueId from = node.inputs[0], to = node.outputs[0];
      const auto view = view_of(trace, node);
      FULMEN_CHECK(view.has_value());
      plan.slots[at(to)] = plan.slots[at(from)];
      plan.slots[at(to)].byte_offset += view->offset * static_cast<int64_t>(dtype_bytes(trace.type(from).dtype));
      block_of[at(to)] = block_of[at(from)];
      continue;
    }
    for (ValueId id : node.outputs) {
      if (id == no_value || plan.slots[at(id)].storage != Storage::none) continue;
      plan.slots[at(id)].storage = Storage::arena;
      block_of[at(id)] = static_cast<int>(blocks.size());
      // Laid-out results (alias_views) are permutations of a contiguous layout, so the element count covers them.
      blocks.push_back({aligned(static_cast<int64_t>(std::max<size_t>(trace.type(id).bytes(), 1))), index, index, -1});
    }
    for (ValueId id : node.inputs)
      if (id != no_value && block_of[at(id)] >= 0) blocks[static_cast<size_t>(block_of[at(id)])].last = index;
  }
  const size_t value_blocks = blocks.size();
  for (size_t n = 0; n < trace.nodes.size(); ++n)
    if (workspace_bytes[n] > 0)
      blocks.push_back({aligned(static_cast<int64_t>(workspace_bytes[n])), static_cast<int>(n), static_cast<int>(n), -1});

  plan.arena_bytes = static_cast<size_t>(place(blocks));
  for (size_t v = 0; v < trace.values.size(); ++v)
    if (block_of[v] >= 0) plan.slots[v].byte_offset += blocks[static_cast<size_t>(block_of[v])].offset;
  size_t next = value_blocks;
  for (size_t n = 0; n < trace.nodes.size(); ++n)
    if (workspace_bytes[n] > 0) plan.workspace_offsets[n] = blocks[next++].offset;
  return plan;
}

}  // namespace fulmen
