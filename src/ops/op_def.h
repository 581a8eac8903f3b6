// One entry of the op catalogue. Everything about an op stands in its entry: signature, shape rule, meaning, gradient,
// documentation, samples, PyTorch names. Tests, docs and bindings are made from the entries (ops/table.h).
//
// To add an op: write an OpDef in its family's file (pointwise.cpp, reduction.cpp, ...). All fields are required.
#pragma once

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "core/error.h"
#include "ir/trace.h"

namespace fulmen {

class Builder;
struct OpDef;

enum class Need { required, optional, variadic };  // variadic: only as the last operand, takes the rest

struct OperandDef {
  std::string name;
  Need need = Need::required;
};

enum class AttrKind { boolean, integer, number, text, dims, dtype };

struct AttrDef {
  std::string name;
  AttrKind kind;
  // Without a default the attribute must be given. std::monostate is the default "none".
  std::optional<AttrValue> fallback;
};

// What a shape rule sees of a call: operand types (null where absent) and attributes with defaults filled in.
struct CallTypes {
  const OpDef& op;
  std::vector<const TensorType*> inputs;
  const Attributes& attrs;

  const TensorType& operator[](size_t i) const { return *inputs[i]; }
  bool has(size_t i) const { return i < inputs.size() && inputs[i] != nullptr; }
  // "op: message"
  [[noreturn]] void shape_error(const std::string& message) const;
  [[noreturn]] void type_error(const std::string& message) const;
};

// Contiguous result types; requires_grad is filled in by the builder.
using ShapeRule = std::function<std::vector<TensorType>(const CallTypes&)>;

// A strided tensor in host memory, as the reference sees it. Elements are double for floats (f64 on request is exact;
// narrower dtypes are rounded on store), int64 for integers and bool.
struct HostTensor {
  TensorType type;      // contiguous
  std::vector<double> f;   // used if is_float(type.dtype)
  std::vector<int64_t> i;  // used otherwise
  double at(int64_t k) const { return is_float(type.dtype) ? f[static_cast<size_t>(k)] : static_cast<double>(i[static_cast<size_t>(k)]); }
  void set(int64_t k, double v) {
    if (is_float(type.dtype)) f[static_cast<size_t>(k)] = v; else i[static_cast<size_t>(k)] = static_cast<int64_t>(v);
  }
};

struct ReferenceArgs {
  std::vector<const HostTensor*> inputs;  // null where absent
  const Attributes& attrs;
  std::vector<HostTensor>& outputs;  // allocated, types set
};

// Plain loops, right for every dtype the shape rule accepts; the oracle of the tests.
struct Primitive {
  std::function<void(const ReferenceArgs&)> reference;
};
// Builds the same function from simpler ops: gets the call's operands, returns its results.
struct Decomposition {
  std::function<std::vector<ValueId>(Builder&, const Node&)> build;
};

// What a gradient rule gets: the node's operands and results as values of the builder's trace, and the gradient of each
// result (no_value where none arrives). It returns one value an operand, no_value where the operand gets none; values
// for operands with need[i] == false are never asked for and may be no_value.
struct GradientArgs {
  const Node& node;
  std::span<const ValueId> inputs;
  std::span<const ValueId> outputs;
  std::span<const ValueId> output_grads;
  std::span<const bool> need;
};
using GradientRule = std::function<std::vector<ValueId>(Builder&, const GradientArgs&)>;
struct NotDifferentiable {
  std::string reason;  // "its result is an integer"
};
// By the decomposition: the rule of a composite is the rules of its parts.
struct ByDecomposition {};

// How autocast treats an op: PyTorch's lists. Some ops are on the fp32 list for CUDA and on none for a CPU.
enum class Autocast { keep, lower, fp32, widest, fp32_on_cuda };

struct Sample {
  std::string name;
  std::vector<std::string> inputs;  // tensor specs; "none" for an absent optional operand
  Attributes attrs;
  std::string domain = "normal";  // value domain of float inputs: normal, positive, unit (0..1), small_int, nonzero
};
struct BadSample {
  Sample call;
  std::string kind;   // "ShapeError" or "TypeError"
  std::string words;  // part of the message
};
struct Samples {
  std::vector<Sample> good;
  std::vector<BadSample> bad;
};

struct OpDef : OpInfo {
  std::string doc;  // what it computes, with formula, shapes and dtypes
  std::vector<OperandDef> operands;
  std::vector<AttrDef> attributes;
  ShapeRule shape;
  std::variant<Primitive, Decomposition> meaning;
  std::variant<GradientRule, NotDifferentiable, ByDecomposition> gradient;
  Autocast autocast;
  Samples samples;
  // PyTorch callables whose positional arguments are this op's operands, then attributes, in the order given in the
  // entry: "torch.tanh", "Tensor.tanh", "torch.nn.functional.relu".
  std::vector<std::string> torch;

  bool is_primitive() const { return std::holds_alternative<Primitive>(meaning); }
};

// A node's entry.
inline const OpDef& op_of(const Node& node) { return static_cast<const OpDef&>(*node.op); }

}  // namespace fulmen
