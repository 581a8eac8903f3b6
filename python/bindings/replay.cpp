// Traces as files: read back from text, and run on random inputs with no framework at all (`fulmen run`).
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <cmath>
#include <random>

#include "bindings.h"
#include "buffer_pool.h"
#include "core/error.h"
#include "core/half.h"
#include "driver/compile.h"
#include "ir/parse.h"
#include "ir/verify.h"
#include "ops/rebuild.h"
#include "ops/table.h"

namespace fulmen::python {
namespace {

double load(const void* data, DType dtype, int64_t i) {
  switch (dtype) {
    case DType::boolean:
    case DType::u8: return static_cast<const uint8_t*>(data)[i];
    case DType::i8: return static_cast<const int8_t*>(data)[i];
    case DType::i16: return static_cast<const int16_t*>(data)[i];
    case DType::i32: return static_cast<const int32_t*>(data)[i];
    case DType::i64: return static_cast<double>(static_cast<const int64_t*>(data)[i]);
    case DType::f16: return static_cast<double>(static_cast<float>(static_cast<const f16*>(data)[i]));
    case DType::bf16: return static_cast<double>(static_cast<float>(static_cast<const bf16*>(data)[i]));
    case DType::f32: return static_cast<double>(static_cast<const float*>(data)[i]);
    case DType::f64: return static_cast<const double*>(data)[i];
  }
  return 0;
}

void store(void* data, DType dtype, int64_t i, double value) {
  switch (dtype) {
    case DType::boolean: static_cast<uint8_t*>(data)[i] = value != 0; break;
    case DType::u8: static_cast<uint8_t*>(data)[i] = static_cast<uint8_t>(value); break;
    case DType::i8: static_cast<int8_t*>(data)[i] = static_cast<int8_t>(value); break;
    case DType::i16: static_cast<int16_t*>(data)[i] = static_cast<int16_t>(value); break;
    case DType::i32: static_cast<int32_t*>(data)[i] = static_cast<int32_t>(value); break;
    case DType::i64: static_cast<int64_t*>(data)[i] = static_cast<int64_t>(value); break;
    case DType::f16: static_cast<f16*>(data)[i] = f16(static_cast<float>(value)); break;
    case DType::bf16: static_cast<bf16*>(data)[i] = bf16(static_cast<float>(value)); break;
    case DType::f32: static_cast<float*>(data)[i] = static_cast<float>(value); break;
    case DType::f64: static_cast<double*>(data)[i] = value; break;
  }
}

size_t span_bytes(const TensorType& type) {
  return static_cast<size_t>(span_elements(type.shape, type.strides)) * dtype_bytes(type.dtype);
}

// Floats are normal; bools fair coins; integers 0 or 1, which are in range for every index into a dim that isn't empty
// or of size 1. The whole span is filled, gaps included.
void fill(const TensorType& type, void* data, std::mt19937_64& random) {
  std::normal_distribution<double> normal;
  const int64_t count = span_elements(type.shape, type.strides);
  for (int64_t i = 0; i < count; ++i)
    store(data, type.dtype, i, is_float(type.dtype) ? normal(random) : static_cast<double>(random() & 1));
}

// {"type", "mean", "largest", "nan_count"} of a contiguous result.
nb::dict summary(const TensorType& type, const void* data) {
  double sum = 0, largest = 0;
  int64_t nan_count = 0;
  const int64_t count = span_elements(type.shape, type.strides);
  for (int64_t i = 0; i < count; ++i) {
    const double value = load(data, type.dtype, i);
    if (std::isnan(value)) {
      ++nan_count;
      continue;
    }
    sum += value;
    largest = std::max(largest, std::fabs(value));
  }
  nb::dict result;
  result["type"] = to_string(type);
  result["mean"] = count > nan_count ? sum / static_cast<double>(count - nan_count) : 0.0;
  result["largest"] = largest;
  result["nan_count"] = nan_count;
  return result;
}

struct Run {
  std::vector<PoolBuffer> outputs;
  double ms = 0;
};

Run run_once(const Program& program, const std::vector<const void*>& inputs) {
  Run run;
  std::vector<void*> pointers;
  for (const TensorType& type : program.outputs()) {
    run.outputs.emplace_back(span_bytes(type));
    pointers.push_back(run.outputs.back().data());
  }
  const PoolBuffer arena(program.arena_bytes());
  const auto begin = std::chrono::steady_clock::now();
  program.run(RunContext{}, inputs.data(), pointers.data(), arena.data());
  run.ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
  return run;
}

// A compiled trace on random inputs, forward and, where it has one, backward.
class Replay {
 public:
  Replay(const Trace& trace, const CompileOptions& options) : trace_(trace), compiled_(compile(trace, options)) {}

  const CompiledTrace& compiled() const { return *compiled_; }

  void draw(uint64_t seed) {
    std::mt19937_64 random(seed);
    for (const TensorType& type : compiled_->forward.inputs()) inputs_.push_back(drawn(type, random));
    if (!compiled_->backward) return;
    const auto& types = compiled_->backward->inputs();
    for (size_t i = types.size() - compiled_->grad_outputs.size(); i < types.size(); ++i) gradients_.push_back(drawn(types[i], random));
  }

  // The results of the trace, then the gradients of the inputs that want one.
  Run run() const {
    Run forward = run_once(compiled_->forward, pointers(inputs_));
    if (!compiled_->backward) return forward;
    std::vector<const void*> given;
    for (int i : compiled_->backward_saved_inputs) given.push_back(inputs_[static_cast<size_t>(i)].data());
    for (size_t i = static_cast<size_t>(compiled_->output_count); i < forward.outputs.size(); ++i) given.push_back(forward.outputs[i].data());
    for (const PoolBuffer& gradient : gradients_) given.push_back(gradient.data());
    Run backward = run_once(*compiled_->backward, given);
    Run both;
    both.ms = forward.ms + backward.ms;
    for (int i = 0; i < compiled_->output_count; ++i) both.outputs.push_back(std::move(forward.outputs[static_cast<size_t>(i)]));
    for (PoolBuffer& gradient : backward.outputs) both.outputs.push_back(std::move(gradient));
    return both;
  }

  std::vector<std::pair<std::string, TensorType>> results() const {
    std::vector<std::pair<std::string, TensorType>> all;
    for (int i = 0; i < compiled_->output_count; ++i) all.emplace_back("result " + std::to_string(i), compiled_->forward.outputs()[static_cast<size_t>(i)]);
    for (size_t i = 0; i < compiled_->inputs_with_grad.size() && compiled_->backward; ++i)
      all.emplace_back("gradient of " + trace_.value(trace_.inputs[static_cast<size_t>(compiled_->inputs_with_grad[i])]).name, compiled_->backward->outputs()[i]);
    return all;
  }

 private:
  static PoolBuffer drawn(const TensorType& type, std::mt19937_64& random) {
    PoolBuffer buffer(span_bytes(type));
    fill(type, buffer.data(), random);
    return buffer;
  }
  static std::vector<const void*> pointers(const std::vector<PoolBuffer>& buffers) {
    std::vector<const void*> result;
    for (const PoolBuffer& buffer : buffers) result.push_back(buffer.data());
    return result;
  }

  const Trace& trace_;
  std::shared_ptr<const CompiledTrace> compiled_;
  std::vector<PoolBuffer> inputs_, gradients_;
};

// The largest difference, relative to the largest element of `expected`.
double difference(const TensorType& type, const PoolBuffer& found, const PoolBuffer& expected) {
  double largest = 0, worst = 0;
  for (int64_t k = 0; k < span_elements(type.shape, type.strides); ++k) {
    const double right = load(expected.data(), type.dtype, k), value = load(found.data(), type.dtype, k);
    if (std::isfinite(right)) largest = std::max(largest, std::fabs(right));
    if ((std::isnan(right) && std::isnan(value)) || right == value) continue;
    if (!std::isfinite(right - value)) return INFINITY;
    worst = std::max(worst, std::fabs(right - value));
  }
  return largest > 0 ? worst / largest : worst;
}

// Runs a trace on random inputs, with its backward if an input is marked "!". With `check`, the last executor of the
// default list alone runs it too.
nb::dict replay(const Trace& parsed, nb::handle executors, uint64_t seed, int repeats, bool check) {
  const Trace trace = rebuild(parsed);
  CompileOptions options;
  options.executors = executors_of(executors);
  options.target = target_of(nb::none());
  for (ValueId id : trace.inputs) {
    options.training |= trace.type(id).requires_grad;
    if (trace.type(id).device.kind != DeviceKind::cpu)
      throw TypeError("run: input " + trace.value(id).name + " is on " + to_string(trace.type(id).device) + "; traces are replayed on the CPU");
  }
  Replay asked(trace, options);
  asked.draw(seed);
  Run last = asked.run();
  std::vector<double> times{last.ms};
  for (int i = 1; i < repeats; ++i) {
    last = asked.run();
    times.push_back(last.ms);
  }
  const auto results = asked.results();
  nb::list outputs, instructions;
  for (size_t i = 0; i < results.size(); ++i) {
    nb::dict entry = summary(results[i].second, last.outputs[i].data());
    entry["name"] = results[i].first;
    outputs.append(entry);
  }
  for (const Program* program : {&asked.compiled().forward, asked.compiled().backward ? &*asked.compiled().backward : nullptr})
    if (program)
      for (const Instruction& instruction : program->instructions()) instructions.append(nb::make_tuple(instruction.executor, instruction.text));
  nb::dict result;
  result["outputs"] = outputs;
  result["instructions"] = instructions;
  result["training"] = asked.compiled().backward.has_value();
  result["ms"] = times;
  if (check) {
    CompileOptions plain = options;
    plain.executors = {default_list().back()};
    Replay reference(trace, plain);
    reference.draw(seed);
    const Run expected = reference.run();
    nb::list differences;
    for (size_t i = 0; i < results.size(); ++i) differences.append(difference(results[i].second, last.outputs[i], expected.outputs[i]));
    result["relative_difference"] = differences;
  }
  return result;
}

}  // namespace

void bind_replay(nb::module_& m) {
  m.def("parse_trace", [](const std::string& text) {
    Trace trace = parse_trace(text, [](std::string_view name) -> const OpInfo* { return find_op(name); });
    verify(trace, "parsing");
    return trace;
  });
  m.def("replay", replay, nb::arg("trace"), nb::arg("executors").none() = nb::none(), nb::arg("seed") = 0, nb::arg("repeats") = 1,
        nb::arg("check") = false);
}

}  // namespace fulmen::python
