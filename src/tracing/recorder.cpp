#include "tracing/recorder.h"

#include "core/philox.h"
#include "ir/verify.h"
#include "ops/table.h"

namespace fulmen {
namespace {

DType default_dtype(const Number& value) {
  if (std::holds_alternative<bool>(value)) return DType::boolean;
  return std::holds_alternative<int64_t>(value) ? DType::i64 : DType::f32;
}

AttrValue as_attribute(const Number& value) {
  return std::visit([](auto v) { return AttrValue(v); }, value);
}

bool is_castable(const TensorType& type) { return is_float(type.dtype) && type.dtype != DType::f64; }

// A name as the text of a trace takes it: "<lambda>" becomes "_lambda_".
std::string word_of(std::string_view name) {
  std::string word(name);
  for (char& c : word)
    if (!(c >= 'a' && c <= 'z') && !(c >= 'A' && c <= 'Z') && !(c >= '0' && c <= '9')) c = '_';
  return word;
}

}  // namespace

Recorder::Recorder(std::string name) : builder_(trace_) { trace_.name = name.empty() ? "program" : word_of(name); }

ValueId Recorder::input(std::string_view name, TensorType type) {
  if (type.device.kind != DeviceKind::cpu) device_ = type.device;
  return trace_.add_input(std::move(type), word_of(name));
}

ValueId Recorder::number(Number value) {
  TensorType type;
  type.dtype = default_dtype(value);
  type.is_number = true;
  numbers_.push_back({value, type, {}});
  return no_value - static_cast<ValueId>(numbers_.size());
}

const TensorType& Recorder::type(ValueId id) const {
  if (is_number(id)) return numbers_.at(static_cast<size_t>(no_value - id - 1)).type;
  if (id < 0 || static_cast<size_t>(id) >= trace_.values.size())
    throw TypeError("recorder: value " + std::to_string(id) + " is not known");
  return trace_.type(id);
}

ValueId Recorder::materialise(ValueId number, DType dtype) {
  NumberEntry& entry = numbers_.at(static_cast<size_t>(no_value - number - 1));
  const auto [at, is_new] = entry.uses.emplace(dtype, no_value);
  if (is_new) {
    AttrValue value = as_attribute(entry.value);
    at->second = builder_.emit1("full", {}, {{"shape", Dims{}}, {"value", value}, {"dtype", dtype}});
    trace_.value(at->second).type.is_number = true;
  }
  return at->second;
}

// A number is computed with in the precision of the call: f64 beside an f64 operand, f32 beside any other float (16-bit
// floats too: PyTorch doesn't round numbers to them), its own kind otherwise.
void Recorder::place_numbers(std::vector<ValueId>& inputs) {
  bool any_float = false, any_f64 = false;
  for (ValueId id : inputs) {
    if (id == no_value) continue;
    const TensorType& found = type(id);
    any_float |= is_float(found.dtype);
    any_f64 |= found.dtype == DType::f64;
  }
  for (ValueId& id : inputs)
    if (is_number(id)) id = materialise(id, any_f64 ? DType::f64 : any_float ? DType::f32 : type(id).dtype);
}

ValueId Recorder::convert(ValueId id, DType dtype) {
  if (trace_.type(id).dtype == dtype) return id;
  const auto [at, is_new] = converted_.emplace(std::pair{id, dtype}, no_value);
  if (is_new) at->second = builder_.convert(id, dtype);
  return at->second;
}

void Recorder::apply_autocast(const OpDef& op, std::vector<ValueId>& inputs) {
  if (!autocast_ || op.autocast == Autocast::keep) return;
  std::optional<DType> wanted;
  bool on_cuda = false;
  for (ValueId id : inputs) {
    if (id < 0) continue;
    const TensorType& found = type(id);
    on_cuda |= found.device.kind == DeviceKind::cuda;
    if (op.autocast == Autocast::widest && is_castable(found))
      wanted = wanted ? promote_dtypes(*wanted, found.dtype) : found.dtype;
  }
  if (op.autocast == Autocast::lower) wanted = autocast_;
  if (op.autocast == Autocast::fp32 || (op.autocast == Autocast::fp32_on_cuda && on_cuda)) wanted = DType::f32;
  if (!wanted) return;
  for (ValueId& id : inputs)
    if (id >= 0 && is_castable(type(id))) id = convert(id, *wanted);
}

ValueId Recorder::detach(ValueId id) {
  if (id < 0 || !trace_.type(id).requires_grad) return id;
  const auto [at, is_new] = detached_.emplace(id, no_value);
  if (is_new) at->second = builder_.emit1("detach", {id});
  return at->second;
}

std::vector<ValueId> Recorder::emit(std::string_view name, std::vector<ValueId> inputs, Attributes attrs) {
  const OpDef& op = require_op(name);
  for (ValueId id : inputs)
    if (id != no_value) type(id);  // names an unknown value before anything is built on it
  if (!grad_enabled_)
    for (ValueId& id : inputs) id = detach(id);
  apply_autocast(op, inputs);
  place_numbers(inputs);
  auto results = builder_.emit(name, std::move(inputs), std::move(attrs));
  if (op.operands.empty() && device_.kind != DeviceKind::cpu)
    for (ValueId id : results) trace_.value(id).type.device = device_;
  return results;
}

ValueId Recorder::seed() {
  if (seed_ == no_value) seed_ = trace_.add_input(contiguous_type(DType::i64, {2}), "rng_seed");
  return seed_;
}

int64_t Recorder::next_offset(int64_t count) {
  const int64_t offset = offset_;
  offset_ += static_cast<int64_t>(philox_draws(static_cast<uint64_t>(count)));
  return offset;
}

void Recorder::output(const std::vector<ValueId>& ids) {
  for (ValueId id : ids) {
    if (is_number(id)) id = materialise(id, type(id).dtype);
    trace_.outputs.push_back(id);
  }
}

Trace Recorder::finish() {
  // The hidden seed stands last, so that the caller's inputs keep their places.
  if (seed_ != no_value) {
    std::erase(trace_.inputs, seed_);
    trace_.inputs.push_back(seed_);
  }
  verify(trace_, "recording");
  return std::move(trace_);
}

}  // namespace fulmen
