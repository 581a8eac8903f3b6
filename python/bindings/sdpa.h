// Attention called alone: one-op programs, compiled once for each kind of call and kept. A kind is everything that is
// baked into a program: dtypes, shapes, strides, devices, gradient needs, every option and the executors that were asked.
// Used by sdpa.cpp (the binding); the Python side (python/fulmen/_attention.py) adds autocast and the random seed.
#pragma once

#include <array>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "compiled.h"
#include "core/error.h"
#include "ops/sdpa_call.h"

namespace fulmen::python {

struct SdpaOptions {
  bool is_causal = false, lower_right = false, enable_gqa = false, deterministic = false, with_lse = false;
  int64_t window_left = -1, window_right = -1;
  double dropout_p = 0.0;
  double scale = 0.0;
  bool has_scale = false;
  double softcap = 0.0;
};

// One call: views of the operands (null data and rank -1 where absent) and which of them want a gradient.
struct SdpaRequest {
  std::array<TensorView, sdpa_operand_count> views;
  std::array<bool, sdpa_operand_count> given{};
  std::array<bool, sdpa_operand_count> needs_grad{};
  SdpaOptions options;
  PyObject* query = nullptr;  // whose stream the call runs on
};

// Calls come with the GIL held.
struct SdpaEntry {
  std::vector<int> operands;  // program input i is operand operands[i]
  std::unique_ptr<const Compiled> compiled;

  // The backward for gradients as they come in. On a GPU a gradient that lies otherwise than the result gets a backward of
  // its own, so that nothing is copied where the library reads it as it is; null for the usual one, which copies.
  std::shared_ptr<const CompiledTrace> backward_for(std::span<PyObject* const> grads) const;

  // What the op was called with, by name; of a training call on a GPU.
  nb::dict attributes() const;

 private:
  friend class SdpaCache;
  static constexpr size_t layout_limit = 8;
  std::optional<Trace> trace_;  // where backward_for may compile
  CompileOptions options_;
  mutable std::map<std::vector<int64_t>, std::shared_ptr<const CompiledTrace>> by_layout_;  // null: the usual one copies
};

// The trace of one call: its inputs are the operands that are given.
Trace sdpa_trace(const SdpaRequest& request);

// Programs by kind of call, the least recently used dropped first. Calls come with the GIL held.
class SdpaCache {
 public:
  explicit SdpaCache(size_t limit = 1024) : limit_(limit) {}

  // Throws the UnsupportedError of a kind that nobody runs, and DeviceError for a new kind while the stream is captured:
  // compiling may build a library's plans, which no CUDA graph can hold.
  std::shared_ptr<const SdpaEntry> find(const SdpaRequest& request, const ExecutorList& executors);

  void clear();
  size_t size() const { return entries_.size(); }
  int64_t hits = 0, builds = 0, dropped = 0;

 private:
  using Key = std::vector<int64_t>;
  struct KeyHash {
    size_t operator()(const Key& key) const;
  };
  struct Slot {
    Key key;
    ExecutorList executors;
    std::shared_ptr<const SdpaEntry> entry;
    std::shared_ptr<const UnsupportedError> refused;  // kept too: on a GPU the caller falls back, and asks often
  };
  static std::shared_ptr<const SdpaEntry> entry_of(const Slot& slot);
  static void write_key(const SdpaRequest& request, const ExecutorList& executors, Key& key);

  size_t limit_;
  std::list<Slot> order_;  // most recently used first
  std::unordered_map<Key, std::list<Slot>::iterator, KeyHash> entries_;
  Key scratch_;
};

}  // namespace fulmen::python
