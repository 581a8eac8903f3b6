// One direction of an attention problem as a cuDNN graph: the only place that sees cuDNN's and its frontend's headers.
// A graph is asked first (prove), then, on a device, built and run. Deviceless graphs stop at the proof.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "executors/cudnn/problem.h"

namespace fulmen::cudnn {

enum class Direction { forward, backward };

enum class Verdict { accepted, refused, prerequisite_missing, failed };

struct Answer {
  Verdict verdict = Verdict::failed;
  std::string message;  // the library's own words, on one line
  std::string plan;     // of the first plan
  int64_t plan_count = 0;
  size_t workspace_bytes = 0;  // of the first plan
};

// Tensors of a graph, by the number that names them in a variant pack. Scale is a host pointer to a float.
enum Slot : int64_t {
  slot_query = 1, slot_key, slot_value, slot_scale, slot_bias, slot_query_lengths, slot_key_lengths, slot_seed,
  slot_offset, slot_out, slot_lse, slot_out_grad, slot_query_grad, slot_key_grad, slot_value_grad, slot_bias_grad,
  slot_count
};

// What a device side is: a handle of the GPU at hand, or a description.
struct Side {
  void* handle = nullptr;       // cudnnHandle_t
  std::string description;      // used if handle is null
  int compute_capability = 0;
};

class Graph {
 public:
  Graph(const Problem& problem, Direction direction, const Side& side);
  ~Graph();

  // Validates, lowers, asks the heuristics and checks support. Once.
  Answer prove();

  // Builds plan `index` (0 is the heuristics' first). False with the reason if it won't.
  bool build(int64_t index, std::string& reason);
  int64_t plan_count() const;
  std::string plan_name(int64_t index) const;
  size_t workspace_bytes() const;  // of the built plan

  // The built plan as bytes, and back: a restored graph needs no proof.
  std::vector<uint8_t> serialize() const;
  static std::unique_ptr<Graph> restore(const std::vector<uint8_t>& bytes, void* handle, std::string& reason);

  // Runs on the handle's stream. pointers[slot] is null where the graph has no such tensor. Throws DeviceError.
  void execute(void* handle, void* const (&pointers)[slot_count], void* workspace) const;

 private:
  struct State;
  explicit Graph(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

// Tells the frontend which library was opened. Before any other call here.
void use_library(void* handle);

// Handles of a device: made in its context, bound to a stream for each run. DeviceError.
void* make_handle();
void set_stream(void* handle, void* stream);

// "cudnn 9.19.0 headers, frontend 1.32.0"
std::string headers_text();

}  // namespace fulmen::cudnn
