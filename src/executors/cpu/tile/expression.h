// A fused group's body as expressions over loop axes: what analyse.cpp makes of the trace and schedule.cpp turns into a
// tile program.
#pragma once

#include <string>
#include <variant>
#include <vector>

#include "executors/cpu/tile/axes.h"
#include "executors/cpu/tile/kernels.h"
#include "ir/trace.h"

namespace fulmen::cpu::tile {

enum class Code : uint8_t { constant, load, pointwise, convert, wrap, round, reduce, multiply_reduce };

// How much of the loop nest (outer axes: rows; inner axes: columns) a value runs along.
enum class Extent : uint8_t { scalar = 0, row = 1, column = 2, full = 3 };
constexpr Extent join(Extent a, Extent b) { return static_cast<Extent>(static_cast<int>(a) | static_cast<int>(b)); }

enum class Reduction : uint8_t { none, over_columns, over_rows, over_all };  // row result, column result, scalar

// A strided piece of an input's or output's memory.
struct MemoryView {
  int index = 0;  // of the body's input or output
  DType dtype = DType::f32;
  int64_t offset = 0;  // elements
  Dims shape, strides;
  AxisDims dims;  // parallel to shape
  // Nothing is there: an element is drawn from its position. `index` is the seed's input, seed_* how that lies.
  bool is_draw = false;
  int64_t seed_offset = 0, seed_stride = 1;
  uint64_t draw_offset = 0, threshold = 0;
};

struct Expression {
  Code code = Code::constant;
  Op op{};
  Fold fold{};
  Domain domain = Domain::f32;
  DType dtype = DType::f32;  // wrap, round: the dtype to wrap or round to
  std::vector<int> args = {};
  int operands = 0;  // of a pointwise op: the tensor operands among args; the rest are attributes
  double number = 0;       // constant, f32 and f64
  int64_t integer = 0;     // constant, i64
  int view = -1;           // load: index into Analysis::views
  std::vector<int> axes = {};   // what the value runs along
  std::vector<int> reduced_axes = {};
};

struct Analysis {
  AxisSpace space;
  std::vector<Expression> expressions;  // operands first
  std::vector<MemoryView> views;        // of loads
  std::vector<int> outputs;             // expression of each body output
  std::vector<MemoryView> output_views;
};

// The body's expressions, or the reason why it can't run as one.
std::variant<Analysis, std::string> analyse(const Trace& body);

// Row of the shared pointwise list, by op name; empty name if it isn't pointwise.
struct PointwiseEntry {
  const char* name;
  Op op;
  int operands;
  pointwise::Kind kind;
  const char* attributes;
};
const PointwiseEntry* find_pointwise(std::string_view name);

}  // namespace fulmen::cpu::tile
