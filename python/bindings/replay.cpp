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

// Runs a trace's forward on random inputs; with `check`, the reference executor alone runs it too, and the largest
// difference relative to the reference's largest value is given for each output.
nb::dict replay(const Trace& trace, nb::handle executors, uint64_t seed, int repeats, bool check) {
  CompileOptions options;
  options.executors = executors_of(executors);
  options.target = target_of(nb::none());
  for (ValueId id : trace.inputs)
    if (trace.type(id).device.kind != DeviceKind::cpu)
      throw TypeError("run: input " + trace.value(id).name + " is on " + to_string(trace.type(id).device) + "; traces are replayed on the CPU");
  const auto compiled = compile(trace, options);
  std::mt19937_64 random(seed);
  std::vector<PoolBuffer> buffers;
  std::vector<const void*> inputs;
  for (const TensorType& type : compiled->forward.inputs()) {
    buffers.emplace_back(span_bytes(type));
    fill(type, buffers.back().data(), random);
    inputs.push_back(buffers.back().data());
  }
  Run last = run_once(compiled->forward, inputs);
  std::vector<double> times{last.ms};
  for (int i = 1; i < repeats; ++i) {
    last = run_once(compiled->forward, inputs);
    times.push_back(last.ms);
  }
  nb::list outputs, instructions;
  for (size_t i = 0; i < last.outputs.size(); ++i) outputs.append(summary(compiled->forward.outputs()[i], last.outputs[i].data()));
  for (const Instruction& instruction : compiled->forward.instructions())
    instructions.append(nb::make_tuple(instruction.executor, instruction.text));
  nb::dict result;
  result["outputs"] = outputs;
  result["instructions"] = instructions;
  result["ms"] = times;
  if (check) {
    CompileOptions plain = options;
    plain.executors = {default_list().back()};
    const auto reference = compile(trace, plain);
    const Run expected = run_once(reference->forward, inputs);
    nb::list differences;
    for (size_t i = 0; i < last.outputs.size(); ++i) {
      const TensorType& type = compiled->forward.outputs()[i];
      double largest = 0, difference = 0;
      for (int64_t k = 0; k < span_elements(type.shape, type.strides); ++k) {
        const double right = load(expected.outputs[i].data(), type.dtype, k), found = load(last.outputs[i].data(), type.dtype, k);
        if (std::isnan(right) && std::isnan(found)) continue;
        if (right == found) continue;
        largest = std::max(largest, std::fabs(right));
        difference = std::isfinite(right - found) ? std::max(difference, std::fabs(right - found)) : INFINITY;
      }
      differences.append(largest > 0 ? difference / largest : difference);
    }
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
