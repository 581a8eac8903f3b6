#include "passes/minimum_cut.h"

#include <algorithm>
#include <limits>

namespace fulmen {

void MinimumCut::add_edge(int from, int to, int64_t capacity) {
  edges_.push_back({to, first_[static_cast<size_t>(from)], capacity});
  first_[static_cast<size_t>(from)] = static_cast<int>(edges_.size()) - 1;
  edges_.push_back({from, first_[static_cast<size_t>(to)], 0});
  first_[static_cast<size_t>(to)] = static_cast<int>(edges_.size()) - 1;
}

bool MinimumCut::find_levels(int source, int sink) {
  level_.assign(first_.size(), -1);
  level_[static_cast<size_t>(source)] = 0;
  std::vector<int> queue{source};
  for (size_t head = 0; head < queue.size(); ++head) {
    const int vertex = queue[head];
    for (int e = first_[static_cast<size_t>(vertex)]; e >= 0; e = edges_[static_cast<size_t>(e)].next) {
      const Edge& edge = edges_[static_cast<size_t>(e)];
      if (edge.capacity <= 0 || level_[static_cast<size_t>(edge.to)] >= 0) continue;
      level_[static_cast<size_t>(edge.to)] = level_[static_cast<size_t>(vertex)] + 1;
      queue.push_back(edge.to);
    }
  }
  return level_[static_cast<size_t>(sink)] >= 0;
}

// One augmenting path by depth-first search with an explicit stack: chains are as long as the program.
int64_t MinimumCut::push(int source, int sink, int64_t limit) {
  std::vector<int> path;  // edges
  int vertex = source;
  for (;;) {
    if (vertex == sink) {
      int64_t flow = limit;
      for (int e : path) flow = std::min(flow, edges_[static_cast<size_t>(e)].capacity);
      for (int e : path) {
        edges_[static_cast<size_t>(e)].capacity -= flow;
        edges_[static_cast<size_t>(e ^ 1)].capacity += flow;
      }
      return flow;
    }
    int& cursor = cursor_[static_cast<size_t>(vertex)];
    while (cursor >= 0) {
      const Edge& edge = edges_[static_cast<size_t>(cursor)];
      if (edge.capacity > 0 && level_[static_cast<size_t>(edge.to)] == level_[static_cast<size_t>(vertex)] + 1) break;
      cursor = edge.next;
    }
    if (cursor >= 0) {
      path.push_back(cursor);
      vertex = edges_[static_cast<size_t>(cursor)].to;
      continue;
    }
    if (vertex == source) return 0;
    const int back = path.back();
    path.pop_back();
    vertex = edges_[static_cast<size_t>(back ^ 1)].to;
    int& stuck = cursor_[static_cast<size_t>(vertex)];
    stuck = edges_[static_cast<size_t>(stuck)].next;
  }
}

std::vector<bool> MinimumCut::solve(int source, int sink) {
  while (find_levels(source, sink)) {
    cursor_ = first_;
    while (push(source, sink, std::numeric_limits<int64_t>::max()) > 0) {
    }
  }
  // The sink's side: vertices that can still reach the sink through residual edges.
  std::vector<bool> reaches_sink(first_.size(), false);
  std::vector<int> queue{sink};
  reaches_sink[static_cast<size_t>(sink)] = true;
  for (size_t head = 0; head < queue.size(); ++head) {
    const int vertex = queue[head];
    for (int e = first_[static_cast<size_t>(vertex)]; e >= 0; e = edges_[static_cast<size_t>(e)].next) {
      const int from = edges_[static_cast<size_t>(e)].to;
      if (edges_[static_cast<size_t>(e ^ 1)].capacity <= 0 || reaches_sink[static_cast<size_t>(from)]) continue;
      reaches_sink[static_cast<size_t>(from)] = true;
      queue.push_back(from);
    }
  }
  std::vector<bool> side(first_.size());
  for (size_t i = 0; i < side.size(); ++i) side[i] = !reaches_sink[i];
  return side;
}

}  // namespace fulmen
