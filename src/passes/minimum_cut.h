// Minimum s-t cut by Dinic's algorithm, on graphs of a few thousand vertices.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace fulmen {

class MinimumCut {
 public:
  explicit MinimumCut(int vertex_count) : first_(static_cast<size_t>(vertex_count), -1) {}

  void add_edge(int from, int to, int64_t capacity);

  // For each vertex: is it on the source's side of a minimum cut? The cut nearest to the sink is taken, so that ties
  // keep results late in the forward.
  std::vector<bool> solve(int source, int sink);

 private:
  struct Edge {
    int to, next;
    int64_t capacity;
  };
  bool find_levels(int source, int sink);
  int64_t push(int vertex, int sink, int64_t limit);

  std::vector<int> first_, level_, cursor_;
  std::vector<Edge> edges_;  // an edge and its reverse stand side by side
};

}  // namespace fulmen
