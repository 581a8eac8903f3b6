// Functions over tensors, recorded once as a trace, then compiled and differentiated like any Fulmen program.
//
//   auto loss = fulmen::compile({{"f32[64,2]"}, {"f32[2,16]!"}, {"f32[64,16]"}}, [](const std::vector<fulmen::Var>& in) {
//     fulmen::Var error = fulmen::tanh(fulmen::matmul(in[0], in[1])) - in[2];
//     return std::vector<fulmen::Var>{fulmen::mean(error * error)};
//   });
//   auto [values, gradients] = loss.value_and_gradients({x, w, y});   // gradients[i] belongs to the i-th input marked "!"
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "fulmen/tensor.h"

namespace fulmen {

class Builder;

// A value of the program that is being recorded. Valid only inside the function given to compile().
class Var {
 public:
  Var(Builder* builder, int32_t id) : builder_(builder), id_(id) {}
  Shape shape() const;
  std::string dtype() const;
  Builder* builder() const { return builder_; }
  int32_t id() const { return id_; }

 private:
  Builder* builder_;
  int32_t id_;
};

using Attribute = std::variant<bool, int64_t, double, std::string, Shape>;

// Any op of the catalogue by name (docs/ops.md lists them): call("softmax", {x}, {{"dim", int64_t{-1}}}).
// Throws ShapeError or TypeError in the words of the op.
std::vector<Var> call(const std::string& op, const std::vector<Var>& operands, const std::map<std::string, Attribute>& attributes = {});

Var operator+(const Var& a, const Var& b);
Var operator-(const Var& a, const Var& b);
Var operator*(const Var& a, const Var& b);
Var operator/(const Var& a, const Var& b);
Var operator*(const Var& a, double b);
Var operator+(const Var& a, double b);
Var matmul(const Var& a, const Var& b);
Var linear(const Var& x, const Var& weight, const Var& bias);  // x weight^T + bias
Var relu(const Var& x);
Var tanh(const Var& x);
Var gelu(const Var& x);
Var softmax(const Var& x, int64_t dim);
Var sum(const Var& x);
Var mean(const Var& x);
Var reshape(const Var& x, const Shape& shape);
Var layer_norm(const Var& x, const Var& weight, const Var& bias, double epsilon = 1e-5);
Var cross_entropy(const Var& logits, const Var& target);  // mean over rows; target holds i64 classes
Var sdpa(const Var& query, const Var& key, const Var& value, bool is_causal = false);

class Function {
 public:
  // ShapeError or TypeError if an input isn't what the function was compiled for.
  std::vector<Tensor> operator()(const std::vector<Tensor>& inputs) const;

  struct Result {
    std::vector<Tensor> values;
    std::vector<Tensor> gradients;  // of the sum of all float outputs, one for each input marked "!"
  };
  Result value_and_gradients(const std::vector<Tensor>& inputs) const;

  // What runs where: the claimed trace of each direction, as text.
  std::string explain() const;

  struct State;

 private:
  friend Function compile(const std::vector<std::string>&, const std::function<std::vector<Var>(const std::vector<Var>&)>&);
  std::shared_ptr<const State> state_;
};

// input_specs: one tensor spec an input, "f32[2,3]", "i64[5]"; "!" at the end marks inputs that want a gradient.
Function compile(const std::vector<std::string>& input_specs,
                 const std::function<std::vector<Var>(const std::vector<Var>&)>& body);

}  // namespace fulmen
