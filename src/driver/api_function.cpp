// The public C++ functions (include/fulmen/function.h): records with a Builder, compiles, runs.
#include <algorithm>
#include <cstdlib>

#include "driver/compile.h"
#include "executors/default_list.h"
#include "fulmen/function.h"
#include "ir/print.h"
#include "ops/builder.h"

namespace fulmen {

struct Function::State {
  std::shared_ptr<const CompiledTrace> inference, training;  // training is null if no input is marked
};

namespace {

std::shared_ptr<const CompiledTrace> compile_for(const Trace& trace, bool training) {
  CompileOptions options;
  options.executors = default_executors();
  options.training = training;
  options.keep_texts = true;
  return fulmen::compile(trace, options);
}

std::shared_ptr<void> arena_of(const Program& program) {
  const size_t bytes = std::max<size_t>((program.arena_bytes() + 63) / 64 * 64, 64);
  void* memory = std::aligned_alloc(64, bytes);
  if (!memory) throw DeviceError("program: the machine has no " + std::to_string(bytes) + " bytes left");
  return std::shared_ptr<void>(memory, std::free);
}

void check_inputs(const Program& program, const std::vector<Tensor>& inputs) {
  const auto& types = program.inputs();
  if (inputs.size() != types.size())
    throw ShapeError("function: got " + std::to_string(inputs.size()) + " inputs, takes " + std::to_string(types.size()));
  for (size_t i = 0; i < types.size(); ++i) {
    if (inputs[i].shape() != types[i].shape || inputs[i].dtype() != dtype_name(types[i].dtype))
      throw ShapeError("function: input " + std::to_string(i) + " is " + inputs[i].dtype() + to_string(inputs[i].shape()) +
                       ", compiled for " + to_string(types[i]));
  }
}

std::vector<Tensor> run(const Program& program, const std::vector<const void*>& inputs) {
  std::vector<Tensor> outputs;
  std::vector<void*> pointers;
  for (const TensorType& type : program.outputs()) {
    outputs.emplace_back(type.shape, std::string(dtype_name(type.dtype)));
    pointers.push_back(outputs.back().raw());
  }
  program.run({}, inputs.data(), pointers.data(), arena_of(program).get());
  return outputs;
}

std::vector<const void*> pointers_of(const std::vector<Tensor>& tensors) {
  std::vector<const void*> pointers;
  for (const Tensor& tensor : tensors) pointers.push_back(tensor.raw());
  return pointers;
}

void fill_with_ones(Tensor& tensor, DType dtype) {
  for (int64_t i = 0; i < tensor.element_count(); ++i) {
    switch (dtype) {
      case DType::f32: tensor.data<float>()[i] = 1.0f; break;
      case DType::f64: tensor.data<double>()[i] = 1.0; break;
      case DType::bf16: tensor.data<uint16_t>()[i] = 0x3f80; break;
      case DType::f16: tensor.data<uint16_t>()[i] = 0x3c00; break;
      default: throw InternalError("internal: a gradient of dtype " + std::string(dtype_name(dtype)));
    }
  }
}

Var first(const std::string& op, const std::vector<Var>& operands, const std::map<std::string, Attribute>& attributes = {}) {
  return call(op, operands, attributes).at(0);
}

Var number_like(const Var& x, double value) {
  const auto dtype = parse_dtype(x.dtype());
  return {x.builder(), x.builder()->number(value, is_float(*dtype) ? *dtype : DType::f32)};
}

}  // namespace

Shape Var::shape() const { return builder_->type(id_).shape; }
std::string Var::dtype() const { return std::string(dtype_name(builder_->type(id_).dtype)); }

std::vector<Var> call(const std::string& op, const std::vector<Var>& operands, const std::map<std::string, Attribute>& attributes) {
  if (operands.empty()) throw TypeError(op + ": a call needs at least one operand here");
  Builder* builder = operands[0].builder();
  std::vector<ValueId> ids;
  for (const Var& operand : operands) {
    if (operand.builder() != builder) throw TypeError(op + ": operands come from two different functions");
    ids.push_back(operand.id());
  }
  Attributes attrs;
  for (const auto& [name, value] : attributes)
    std::visit([&](const auto& v) { attrs.set(name, AttrValue(v)); }, value);
  std::vector<Var> results;
  for (ValueId id : builder->emit(op, ids, attrs)) results.emplace_back(builder, id);
  return results;
}

Var operator+(const Var& a, const Var& b) { return first("add", {a, b}); }
Var operator-(const Var& a, const Var& b) { return first("sub", {a, b}); }
Var operator*(const Var& a, const Var& b) { return first("mul", {a, b}); }
Var operator/(const Var& a, const Var& b) { return first("div", {a, b}); }
Var operator*(const Var& a, double b) { return a * number_like(a, b); }
Var operator+(const Var& a, double b) { return a + number_like(a, b); }
Var matmul(const Var& a, const Var& b) { return first("matmul", {a, b}); }
Var linear(const Var& x, const Var& weight, const Var& bias) { return first("linear", {x, weight, bias}); }
Var relu(const Var& x) { return first("relu", {x}); }
Var tanh(const Var& x) { return first("tanh", {x}); }
Var gelu(const Var& x) { return first("gelu", {x}); }
Var softmax(const Var& x, int64_t dim) { return first("softmax", {x}, {{"dim", dim}}); }
Var sum(const Var& x) { return first("sum", {x}, {{"dims", Shape{}}, {"keepdim", false}}); }
Var mean(const Var& x) { return first("mean", {x}, {{"dims", Shape{}}, {"keepdim", false}}); }
Var reshape(const Var& x, const Shape& shape) { return first("reshape", {x}, {{"shape", shape}}); }
Var layer_norm(const Var& x, const Var& weight, const Var& bias, double epsilon) {
  return first("layer_norm", {x, weight, bias}, {{"normalized_ndim", static_cast<int64_t>(weight.shape().size())}, {"eps", epsilon}});
}
Var cross_entropy(const Var& logits, const Var& target) { return first("cross_entropy", {logits, target}); }
Var sdpa(const Var& query, const Var& key, const Var& value, bool is_causal) {
  return first("sdpa", {query, key, value}, {{"is_causal", is_causal}});
}

Function compile(const std::vector<std::string>& input_specs, const std::function<std::vector<Var>(const std::vector<Var>&)>& body) {
  Trace trace;
  Builder builder(trace);
  std::vector<Var> inputs;
  bool any_grad = false;
  for (size_t i = 0; i < input_specs.size(); ++i) {
    const TensorType type = parse_tensor_spec(input_specs[i]);
    if (!type.is_contiguous()) throw ShapeError("function: input " + std::to_string(i) + " is " + to_string(type) + "; C++ tensors are contiguous");
    any_grad |= type.requires_grad;
    inputs.emplace_back(&builder, trace.add_input(type, "x" + std::to_string(i)));
  }
  for (const Var& result : body(inputs)) trace.outputs.push_back(result.id());
  auto state = std::make_shared<Function::State>();
  state->inference = compile_for(trace, false);
  if (any_grad) state->training = compile_for(trace, true);
  Function function;
  function.state_ = std::move(state);
  return function;
}

std::vector<Tensor> Function::operator()(const std::vector<Tensor>& inputs) const {
  check_inputs(state_->inference->forward, inputs);
  return run(state_->inference->forward, pointers_of(inputs));
}

Function::Result Function::value_and_gradients(const std::vector<Tensor>& inputs) const {
  if (!state_->training || !state_->training->backward)
    throw TypeError("function: no input was marked with '!', so there is no gradient to compute");
  const CompiledTrace& compiled = *state_->training;
  check_inputs(compiled.forward, inputs);
  Result result;
  result.values = run(compiled.forward, pointers_of(inputs));
  std::vector<const void*> operands;
  for (int i : compiled.backward_saved_inputs) operands.push_back(inputs[static_cast<size_t>(i)].raw());
  for (size_t i = static_cast<size_t>(compiled.output_count); i < result.values.size(); ++i) operands.push_back(result.values[i].raw());
  std::vector<Tensor> ones;
  for (int i : compiled.grad_outputs) {
    const TensorType& type = compiled.forward.outputs()[static_cast<size_t>(i)];
    ones.emplace_back(type.shape, std::string(dtype_name(type.dtype)));
    fill_with_ones(ones.back(), type.dtype);
    operands.push_back(ones.back().raw());
  }
  result.gradients = run(*compiled.backward, operands);
  result.values.resize(static_cast<size_t>(compiled.output_count));
  return result;
}

std::string Function::explain() const {
  const CompiledTrace& compiled = state_->training ? *state_->training : *state_->inference;
  std::string text;
  for (const Stage& stage : compiled.stages)
    if (stage.name.starts_with("program")) text += stage.text;
  return text;
}

}  // namespace fulmen
