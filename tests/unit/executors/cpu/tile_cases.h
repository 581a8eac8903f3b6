// Runs a trace as one tile program on random inputs and compares with the evaluator in float64. Every buffer has canaries
// around it; inputs may have any strides.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "core/half.h"
#include "core/parallel.h"
#include "executors/cpu/tile/program.h"
#include "executors/reference/evaluate.h"
#include "executors/reference/host_memory.h"
#include "ops/builder.h"

namespace fulmen::cpu::tile::testing {

// Memory of one tensor between two guards of a known pattern.
class GuardedBuffer {
 public:
  explicit GuardedBuffer(const TensorType& type)
      : bytes_(static_cast<size_t>(span_elements(type.shape, type.strides)) * dtype_bytes(type.dtype)), memory_(bytes_ + 2 * guard + 64, pattern) {
    start_ = (64 - reinterpret_cast<uintptr_t>(memory_.data()) % 64) % 64 + guard;
  }
  void* data() { return memory_.data() + start_; }
  bool is_intact() const {
    for (size_t i = 0; i < guard; ++i)
      if (memory_[start_ - 1 - i] != pattern || memory_[start_ + bytes_ + i] != pattern) return false;
    return true;
  }

 private:
  static constexpr size_t guard = 192;
  static constexpr unsigned char pattern = 0xA5;
  size_t bytes_, start_ = 0;
  std::vector<unsigned char> memory_;
};

inline HostTensor random_tensor(const TensorType& type, std::mt19937& generator, double low, double high) {
  HostTensor tensor;
  tensor.type = contiguous_type(type.dtype, type.shape);
  const int64_t count = type.element_count();
  if (is_float(type.dtype)) {
    std::uniform_real_distribution<double> uniform(low, high);
    tensor.f.resize(static_cast<size_t>(count));
    for (double& x : tensor.f) {
      x = uniform(generator);
      if (type.dtype == DType::bf16) x = static_cast<float>(bf16(static_cast<float>(x)));
      else if (type.dtype == DType::f16) x = static_cast<float>(f16(static_cast<float>(x)));
      else if (type.dtype == DType::f32) x = static_cast<float>(x);
    }
  } else {
    std::uniform_int_distribution<int64_t> uniform(type.dtype == DType::boolean || type.dtype == DType::u8 ? 0 : -9, type.dtype == DType::boolean ? 1 : 9);
    tensor.i.resize(static_cast<size_t>(count));
    for (int64_t& x : tensor.i) x = uniform(generator);
  }
  return tensor;
}

struct Tolerance {
  double absolute = 2e-6, relative = 2e-6;
};

// Builds the trace with `build`, which returns the outputs for the given inputs.
using BuildCase = std::function<std::vector<ValueId>(Builder&, const std::vector<ValueId>&)>;

inline Trace make_trace(const std::vector<std::string>& specs, const BuildCase& build) {
  Trace trace;
  std::vector<ValueId> inputs;
  for (const std::string& spec : specs) inputs.push_back(trace.add_input(parse_tensor_spec(spec)));
  Builder builder(trace);
  trace.outputs = build(builder, inputs);
  return trace;
}

inline void check_outputs(const Trace& trace, const std::vector<HostTensor>& inputs, std::vector<GuardedBuffer>& outputs, Tolerance tolerance) {
  const std::vector<HostTensor> expected = evaluate(trace, inputs);
  for (size_t k = 0; k < outputs.size(); ++k) {
    EXPECT_TRUE(outputs[k].is_intact()) << "output " << k << ": written outside";
    const TensorType& type = trace.type(trace.outputs[k]);
    const HostTensor found = reference::load(type, outputs[k].data());
    Tolerance limit = tolerance;
    if (type.dtype == DType::bf16) limit = {tolerance.absolute + 1e-3, 0.0045};
    if (type.dtype == DType::f16) limit = {tolerance.absolute + 1e-4, 0.0006};
    int shown = 0;
    for (int64_t i = 0; i < type.element_count() && shown < 4; ++i) {
      const double want = expected[k].at(i), got = found.at(i);
      if (std::isnan(want) ? std::isnan(got) : want == got || std::abs(want - got) <= limit.absolute + limit.relative * std::abs(want)) continue;
      ADD_FAILURE() << "output " << k << " " << to_string(type) << " element " << i << ": " << got << ", needed " << want;
      ++shown;
    }
  }
}

// Runs on every instruction set of this machine.
inline void check_case(const std::vector<std::string>& specs, const BuildCase& build, double low = -2.0, double high = 2.0, Tolerance tolerance = {}) {
  const Trace trace = make_trace(specs, build);
  std::mt19937 generator(7);
  std::vector<HostTensor> inputs;
  std::vector<GuardedBuffer> memory;
  std::vector<const void*> pointers;
  for (ValueId id : trace.inputs) {
    inputs.push_back(random_tensor(trace.type(id), generator, low, high));
    memory.emplace_back(trace.type(id));
    // Expanded dims share memory: what is there last counts.
    reference::store(inputs.back(), trace.type(id), memory.back().data());
    inputs.back() = reference::load(trace.type(id), memory.back().data());
  }
  for (GuardedBuffer& buffer : memory) pointers.push_back(buffer.data());
  for (Isa isa : available_isas()) {
    if (isa > Isa::avx512) continue;  // no kernels of their own
    SCOPED_TRACE(std::string(isa_name(isa)));
    auto compiled = compile_body(trace, isa);
    ASSERT_TRUE(std::holds_alternative<Program>(compiled)) << std::get<std::string>(compiled);
    const Program& program = std::get<Program>(compiled);
    std::vector<GuardedBuffer> outputs;
    std::vector<void*> output_pointers;
    for (ValueId id : trace.outputs) outputs.emplace_back(trace.type(id));
    for (GuardedBuffer& buffer : outputs) output_pointers.push_back(buffer.data());
    GuardedBuffer workspace(contiguous_type(DType::u8, {program.workspace_bytes}));
    run(program, pointers.data(), output_pointers.data(), workspace.data());
    EXPECT_TRUE(workspace.is_intact());
    check_outputs(trace, inputs, outputs, tolerance);
  }
  for (GuardedBuffer& buffer : memory) EXPECT_TRUE(buffer.is_intact());
}

inline std::string refusal_of(const std::vector<std::string>& specs, const BuildCase& build) {
  auto compiled = compile_body(make_trace(specs, build), chosen_isa());
  return std::holds_alternative<std::string>(compiled) ? std::get<std::string>(compiled) : "";
}

}  // namespace fulmen::cpu::tile::testing
