#include "driver/audit.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <unordered_set>

#include "core/error.h"
#include "driver/compile.h"
#include "executors/reference/host_memory.h"
#include "ir/print.h"
#include "passes/decompose.h"
#include "runtime/cuda/driver.h"

namespace fulmen {
namespace {

std::atomic<int> state{-1};  // -1: not asked yet
std::atomic<int64_t> checked{0}, differing{0}, left_out{0};
std::mutex seen_mutex;

bool first_time(std::string key) {
  static std::unordered_set<std::string>& seen = *new std::unordered_set<std::string>();
  std::lock_guard lock(seen_mutex);
  return seen.insert(std::move(key)).second;
}

// Attention's dropout: each executor draws its own mask.
bool draws_mask(const Trace& trace) {
  return std::any_of(trace.nodes.begin(), trace.nodes.end(), [](const Node& node) {
    return node.attrs.has("dropout_p") && node.attrs.get_float("dropout_p") > 0.0;
  });
}

thread_local bool auditing = false;  // the decomposition's own kernels aren't under audit

std::vector<double> numbers(const char* memory, const TensorType& type) {
  HostTensor host = reference::load(type, memory);
  if (is_float(type.dtype)) return std::move(host.f);
  return {host.i.begin(), host.i.end()};
}

// The last bit of about half of the numbers, towards zero.
template <class Word>
void nudge_words(std::vector<char>& bytes, Word infinity) {
  uint32_t draw = 12345;
  for (size_t at = 0; at + sizeof(Word) <= bytes.size(); at += sizeof(Word)) {
    Word word;
    std::memcpy(&word, bytes.data() + at, sizeof word);
    const Word magnitude = word & static_cast<Word>(~(Word{1} << (8 * sizeof(Word) - 1)));
    draw = draw * 1664525u + 1013904223u;
    if (magnitude == 0 || magnitude >= infinity || !(draw >> 31)) continue;
    --word;
    std::memcpy(bytes.data() + at, &word, sizeof word);
  }
}

void nudge(std::vector<char>& bytes, DType dtype) {
  switch (dtype) {
    case DType::bf16: return nudge_words<uint16_t>(bytes, 0x7f80);
    case DType::f16: return nudge_words<uint16_t>(bytes, 0x7c00);
    case DType::f32: return nudge_words<uint32_t>(bytes, 0x7f800000u);
    case DType::f64: return nudge_words<uint64_t>(bytes, 0x7ff0000000000000ull);
    default: return;
  }
}

double unit_of(DType dtype) {
  switch (dtype) {
    case DType::bf16: return 0x1p-8;
    case DType::f16: return 0x1p-11;
    case DType::f32: return 0x1p-24;
    case DType::f64: return 0x1p-53;
    default: return 0;
  }
}

size_t bytes_of(const TensorType& type) {
  return type.element_count() == 0 ? 0 : static_cast<size_t>(span_elements(type.shape, type.strides)) * dtype_bytes(type.dtype);
}

std::vector<char> download(const void* memory, const TensorType& type, const Target& target, const RunContext& context) {
  std::vector<char> bytes(bytes_of(type));
  if (bytes.empty() || !memory) return bytes;
  if (target.kind == DeviceKind::cpu) {
    std::memcpy(bytes.data(), memory, bytes.size());
  } else {
    const cuda::Driver& driver = cuda::Driver::require();
    driver.copy_to_host(context.device_index, bytes.data(), memory, bytes.size(), context.stream);
    driver.synchronize(context.device_index, context.stream);
  }
  return bytes;
}

double root_mean_square(const std::vector<double>& values) {
  double sum = 0;
  for (double value : values) sum += std::isfinite(value) ? value * value : 0;
  return std::sqrt(sum / static_cast<double>(std::max<size_t>(1, values.size())));
}

std::string difference(const std::vector<double>& found, const std::vector<double>& right, const std::vector<double>& nudged,
                       const TensorType& type, double terms) {
  const double unit = unit_of(type.dtype);
  std::vector<double> moved(right.size());
  for (size_t i = 0; i < right.size(); ++i) moved[i] = nudged[i] - right[i];
  const double rms = root_mean_square(right), rms_moved = root_mean_square(moved);
  const size_t row = type.shape.empty() ? 1 : std::max<size_t>(1, static_cast<size_t>(type.shape.back()));
  for (size_t begin = 0; begin < right.size(); begin += row) {
    double largest = 0, most_moved = 0;
    for (size_t i = begin; i < std::min(begin + row, right.size()); ++i) {
      if (std::isfinite(right[i])) largest = std::max(largest, std::abs(right[i]));
      if (std::isfinite(moved[i])) most_moved = std::max(most_moved, std::abs(moved[i]));
    }
    const double allowed = unit == 0 ? 0 : unit * (16 + 2 * std::sqrt(terms)) * (largest + rms) + 16 * (most_moved + rms_moved) + 1e-30;
    for (size_t i = begin; i < std::min(begin + row, right.size()); ++i) {
      if (!std::isfinite(right[i]) || !std::isfinite(nudged[i])) continue;  // an input's own inf or NaN
      if (unit == 0 && right[i] != nudged[i]) continue;  // a decision that the last bit of an input changes
      if (std::abs(found[i] - right[i]) <= allowed) continue;
      char text[160];
      std::snprintf(text, sizeof text, "[%zu] is %.6g, the decomposition gives %.6g (allowed difference %.2g)", i, found[i], right[i], allowed);
      return text;
    }
  }
  return {};
}

}  // namespace

bool audit_enabled() {
  if (auditing) return false;
  int now = state.load(std::memory_order_relaxed);
  if (now < 0) {
    const char* text = std::getenv("FULMEN_AUDIT");
    now = text && *text && std::string_view(text) != "0";
    state.store(now);
  }
  return now == 1;
}

bool set_audit(bool on) {
  const bool was = audit_enabled();
  state.store(on);
  return was;
}

AuditCounts audit_counts() { return {checked.load(), differing.load(), left_out.load()}; }

std::unique_ptr<AuditSample> AuditSample::take(const Trace& single, const ExecutorList& others, const std::string& executor,
                                               const Target& target, const RunContext& context,
                                               const std::vector<const void*>& inputs) {
  if (target.kind == DeviceKind::cuda) {
    const cuda::Driver* driver = cuda::Driver::find();
    if (!driver || driver->capture_state(context.device_index, context.stream) != cuda::CaptureState::none) return nullptr;
  }
  if (!first_time(executor + "\n" + target.name + "\n" + to_string(single))) return nullptr;
  if (draws_mask(single) || others.empty()) {
    ++left_out;
    return nullptr;
  }
  std::unique_ptr<AuditSample> sample(new AuditSample());
  sample->reference_ = decompose(single, [](const Trace&, const Node&) { return false; });
  for (Value& value : sample->reference_.values) value.type.device = Device{};
  sample->others_ = others;
  sample->target_ = target;
  sample->context_ = context;
  for (size_t i = 0; i < inputs.size(); ++i)
    sample->inputs_.push_back(download(inputs[i], single.type(single.inputs[i]), target, context));
  return sample;
}

std::vector<std::vector<double>> AuditSample::expected(bool nudged) const {
  CompileOptions options;
  options.executors = others_;
  options.target = Target{};
  const auto compiled = compile(reference_, options);
  const Program& program = compiled->forward;
  std::vector<std::vector<char>> inputs = inputs_, outputs;
  std::vector<const void*> in;
  std::vector<void*> out;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (nudged) nudge(inputs[i], program.inputs()[i].dtype);
    in.push_back(inputs[i].data());
  }
  for (const TensorType& type : program.outputs()) outputs.emplace_back(bytes_of(type));
  for (auto& bytes : outputs) out.push_back(bytes.data());
  void* arena = program.arena_bytes() ? std::aligned_alloc(64, (program.arena_bytes() + 63) / 64 * 64) : nullptr;
  const std::unique_ptr<void, void (*)(void*)> owner(arena, std::free);
  program.run(RunContext{}, in.data(), out.data(), arena);
  std::vector<std::vector<double>> values;
  for (size_t i = 0; i < outputs.size(); ++i) values.push_back(numbers(outputs[i].data(), program.outputs()[i]));
  return values;
}

std::string AuditSample::compare(const std::vector<const void*>& results, const std::vector<TensorType>& types) const {
  std::vector<std::vector<double>> right, nudged;
  auditing = true;
  try {
    right = expected(false);
    nudged = expected(true);
  } catch (const Error&) {  // nobody else computes it
    auditing = false;
    ++left_out;
    return {};
  }
  auditing = false;
  ++checked;
  double input_elements = 0;
  for (const ValueId id : reference_.inputs) input_elements += static_cast<double>(reference_.type(id).element_count());
  for (size_t i = 0; i < results.size(); ++i) {
    const std::vector<char> bytes = download(results[i], types[i], target_, context_);
    const std::vector<double> found = numbers(bytes.data(), types[i]);
    const double terms = input_elements / static_cast<double>(std::max<size_t>(1, found.size()));
    const std::string text = difference(found, right[i], nudged[i], types[i], terms);
    if (text.empty()) continue;
    ++differing;
    return "result " + std::to_string(i) + text;
  }
  return {};
}

}  // namespace fulmen
