// Records a program call by call: the one way by which Python and C++ callers make traces. It adds to ops/builder.h what
// belongs to the moment of recording: numbers that take their dtype from the call they are used in, autocast, regions
// without gradients, and one hidden random seed for all random ops of the trace. Which user call becomes which op is
// decided by the caller (python/fulmen/torch_backend for PyTorch).
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "ops/builder.h"

namespace fulmen {

using Number = std::variant<bool, int64_t, double>;

class Recorder {
 public:
  explicit Recorder(std::string name);
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;

  ValueId input(std::string_view name, TensorType type);

  // Operands may be values, numbers or no_value. Applies autocast and the gradient mode, then the op's shape rule.
  std::vector<ValueId> emit(std::string_view op, std::vector<ValueId> inputs, Attributes attrs = {});

  // A number as an operand. It is no value of the trace yet (its id is below no_value): each use makes a 0-dim `full`
  // of the dtype that the other operands call for, and equal uses share it.
  ValueId number(Number value);
  bool is_number(ValueId id) const { return id < no_value; }

  // Of a number: 0-dim, its default dtype (f32 for a float, i64 for an integer), is_number set.
  const TensorType& type(ValueId id) const;

  // Autocast to bf16 or f16 from here on, by the autocast field of each op; nothing switches it off. Converted values
  // are kept, so a weight that is used twice is converted once.
  void set_autocast(std::optional<DType> dtype) { autocast_ = dtype; }
  std::optional<DType> autocast() const { return autocast_; }

  // While off, operands are detached first: no gradient flows through the ops recorded.
  void set_grad_enabled(bool enabled) { grad_enabled_ = enabled; }
  bool grad_enabled() const { return grad_enabled_; }

  // The same elements without a gradient.
  ValueId detach(ValueId id);

  // The hidden trace input `rng_seed`, i64[2], added at first use, and the counter offset for a random op that draws
  // `count` numbers. Offsets of two draws never overlap.
  ValueId seed();
  bool has_seed() const { return seed_ != no_value; }
  int64_t next_offset(int64_t count);

  void output(const std::vector<ValueId>& ids);

  const Trace& trace() const { return trace_; }
  Trace finish();

 private:
  ValueId materialise(ValueId number, DType dtype);
  ValueId convert(ValueId id, DType dtype);
  void apply_autocast(const OpDef& op, std::vector<ValueId>& inputs);
  void place_numbers(std::vector<ValueId>& inputs);

  struct NumberEntry {
    Number value;
    TensorType type;
    std::map<DType, ValueId> uses;
  };

  Trace trace_;
  Builder builder_;
  std::vector<NumberEntry> numbers_;
  std::optional<DType> autocast_;
  bool grad_enabled_ = true;
  std::map<std::pair<ValueId, DType>, ValueId> converted_;
  std::unordered_map<ValueId, ValueId> detached_;
  Device device_;  // of the inputs: where values made from nothing are
  ValueId seed_ = no_value;
  int64_t offset_ = 0;
};

}  // namespace fulmen
