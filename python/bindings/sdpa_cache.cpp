#include <bit>
#include <cstring>

#include "bindings.h"
#include "claiming/claim.h"
#include "core/error.h"
#include "ops/builder.h"
#include "ops/table.h"
#include "runtime/cuda/driver.h"
#include "sdpa.h"

namespace fulmen::python {
namespace {

// Strides of dims of size 1 have no meaning: they are those of a contiguous tensor, so that they never make a new kind.
TensorType normalised_type(const TensorView& view, bool requires_grad) {
  TensorType type = view.type();
  int64_t next = 1;
  for (size_t i = type.shape.size(); i-- > 0;) {
    if (type.shape[i] == 1) type.strides[i] = next;
    next = type.strides[i] * std::max<int64_t>(type.shape[i], 1);
  }
  type.requires_grad = requires_grad;
  return type;
}

constexpr const char* operand_names[sdpa_operand_count] = {"query", "key", "value", "mask", "sink", "alibi_slopes",
                                                           "query_offsets", "key_offsets", "key_lengths", "seed"};

}  // namespace

Trace sdpa_trace(const SdpaRequest& request) {
  Trace trace;
  trace.name = "sdpa";
  Builder builder(trace);
  std::vector<ValueId> operands(sdpa_operand_count, no_value);
  for (int i = 0; i < sdpa_operand_count; ++i)
    if (request.given[static_cast<size_t>(i)])
      operands[static_cast<size_t>(i)] = trace.add_input(
          normalised_type(request.views[static_cast<size_t>(i)], request.needs_grad[static_cast<size_t>(i)]), operand_names[i]);
  const SdpaOptions& o = request.options;
  const OpDef& op = require_op("sdpa");
  Attributes attrs;
  const auto set = [&](const char* name, AttrValue value, bool is_default) {
    for (const AttrDef& attr : op.attributes)
      if (attr.name == name) {
        attrs.set(name, std::move(value));
        return;
      }
    if (!is_default) throw UnsupportedError(std::string("sdpa: the op has no attribute '") + name + "'");
  };
  set("is_causal", o.is_causal, !o.is_causal);
  set("lower_right", o.lower_right, !o.lower_right);
  set("enable_gqa", o.enable_gqa, !o.enable_gqa);
  set("window_left", o.window_left, o.window_left < 0);
  set("window_right", o.window_right, o.window_right < 0);
  set("dropout_p", o.dropout_p, o.dropout_p == 0.0);
  if (o.has_scale) set("scale", o.scale, false);
  set("softcap", o.softcap, o.softcap == 0.0);
  set("return_lse", o.with_lse, !o.with_lse);
  const std::vector<ValueId> results = builder.emit("sdpa", operands, std::move(attrs));
  trace.outputs = {results[0]};
  if (o.with_lse) {
    if (results.size() < 2) throw UnsupportedError("sdpa: the op gives no log-sum-exp");
    trace.outputs.push_back(results[1]);
  }
  return trace;
}

size_t SdpaCache::KeyHash::operator()(const Key& key) const {
  uint64_t hash = 0x9e3779b97f4a7c15u ^ key.size();
  for (int64_t word : key) {
    hash = (hash ^ static_cast<uint64_t>(word)) * 0xff51afd7ed558ccdu;
    hash ^= hash >> 32;
  }
  return hash;
}

void SdpaCache::write_key(const SdpaRequest& request, const ExecutorList& executors, Key& key) {
  key.clear();
  // A slot keeps its executors alive, so an address names one executor.
  key.push_back(static_cast<int64_t>(executors.size()));
  for (const auto& executor : executors) key.push_back(reinterpret_cast<int64_t>(executor.get()));
  const SdpaOptions& o = request.options;
  key.push_back(o.is_causal | o.lower_right << 1 | o.enable_gqa << 2 | o.deterministic << 3 | o.with_lse << 4 | o.has_scale << 5);
  key.push_back(o.window_left);
  key.push_back(o.window_right);
  key.push_back(std::bit_cast<int64_t>(o.dropout_p));
  key.push_back(std::bit_cast<int64_t>(o.scale));
  key.push_back(std::bit_cast<int64_t>(o.softcap));
  for (size_t i = 0; i < sdpa_operand_count; ++i) {
    if (!request.given[i]) {
      key.push_back(-1);
      continue;
    }
    const TensorView& view = request.views[i];
    key.push_back(static_cast<int64_t>(view.dtype) | static_cast<int64_t>(view.device.kind) << 8 |
                  static_cast<int64_t>(request.needs_grad[i]) << 16 | static_cast<int64_t>(view.rank) << 24 |
                  static_cast<int64_t>(view.device.index) << 40);
    for (int d = 0; d < view.rank; ++d) {
      key.push_back(view.shape[d]);
      key.push_back(view.shape[d] == 1 ? 0 : view.strides[d]);
    }
  }
}

namespace {

// What each executor says to the call itself: a compile that fails names only the part it failed at.
UnsupportedError refusal_of(const Trace& trace, const CompileOptions& options) {
  Call call = call_of(trace, trace.nodes.back(), options.training);
  call.deterministic = options.deterministic;
  return unclaimed("sdpa", claim_call(call, options.executors, options.target, true).answers);
}

}  // namespace

namespace {

bool is_captured(PyObject* tensor, Device device) {
  if (device.kind != DeviceKind::cuda || !tensor) return false;
  const cuda::Driver* driver = cuda::Driver::find();
  return driver && driver->capture_state(device.index, current_stream(framework_of(tensor), device)) != cuda::CaptureState::none;
}

}  // namespace

std::shared_ptr<const CompiledTrace> SdpaEntry::backward_for(std::span<PyObject* const> grads) const {
  if (!trace_ || !compiled->trace().backward) return nullptr;
  const CompiledTrace& usual = compiled->trace();
  const std::vector<TensorType>& types = usual.backward->inputs();
  const size_t first = types.size() - usual.grad_outputs.size();
  std::vector<int64_t> key;
  std::vector<std::optional<Dims>> layouts(static_cast<size_t>(usual.output_count));
  bool differs = false;
  TensorReader reader;
  for (size_t k = 0; k < usual.grad_outputs.size(); ++k) {
    const auto output = static_cast<size_t>(usual.grad_outputs[k]);
    if (output >= grads.size() || grads[output] == Py_None) return nullptr;
    const TensorType& type = types[first + k];
    const TensorView view = reader.read(grads[output], "sdpa: gradient");
    if (view.rank != type.rank()) return nullptr;
    Dims strides(static_cast<size_t>(view.rank));
    for (size_t i = 0; i < strides.size(); ++i) {
      if (view.shape[i] != type.shape[i]) return nullptr;
      strides[i] = view.shape[i] == 1 ? type.strides[i] : view.strides[i];
      differs |= strides[i] != type.strides[i];
      key.push_back(strides[i]);
    }
    layouts[output] = std::move(strides);
  }
  if (!differs) return nullptr;
  if (const auto known = by_layout_.find(key); known != by_layout_.end()) return known->second;
  if (by_layout_.size() >= layout_limit || is_captured(grads[0], options_.target.kind == DeviceKind::cuda
                                                                     ? Device{DeviceKind::cuda, options_.target.device_index}
                                                                     : Device{}))
    return nullptr;
  CompileOptions options = options_;
  options.grad_layouts = std::move(layouts);
  std::shared_ptr<const CompiledTrace> made;
  try {
    made = compile_trace(*trace_, options);
  } catch (const UnsupportedError&) {
    made = nullptr;  // then it is copied
  }
  return by_layout_.emplace(std::move(key), std::move(made)).first->second;
}

nb::dict SdpaEntry::attributes() const {
  FULMEN_CHECK(trace_);
  nb::dict result;
  for (const auto& [name, value] : trace_->nodes.back().attrs)
    std::visit([&, key = name.c_str()](const auto& v) {
      using T = std::decay_t<decltype(v)>;
      if constexpr (std::is_same_v<T, bool> || std::is_same_v<T, int64_t> || std::is_same_v<T, double>) result[key] = v;
      else if constexpr (std::is_same_v<T, std::monostate>) result[key] = nb::none();
    }, value);
  return result;
}

std::shared_ptr<const SdpaEntry> SdpaCache::entry_of(const Slot& slot) {
  if (slot.refused) throw UnsupportedError(*slot.refused);
  return slot.entry;
}

std::shared_ptr<const SdpaEntry> SdpaCache::find(const SdpaRequest& request, const ExecutorList& executors) {
  write_key(request, executors, scratch_);
  if (!order_.empty() && order_.front().key == scratch_) {
    ++hits;
    return entry_of(order_.front());
  }
  if (const auto at = entries_.find(scratch_); at != entries_.end()) {
    ++hits;
    order_.splice(order_.begin(), order_, at->second);
    return entry_of(order_.front());
  }
  if (is_captured(request.query, request.views[sdpa_query].device))
    throw DeviceError("sdpa: the first call of its kind is compiled, which can't be captured in a CUDA graph; run it once before the capture");
  const Key key = scratch_;  // compiling releases the GIL, and another call may use the scratch
  const Trace trace = sdpa_trace(request);
  auto entry = std::make_shared<SdpaEntry>();
  CompileOptions options;
  options.executors = executors;
  for (int i = 0; i < sdpa_operand_count; ++i) {
    if (!request.given[static_cast<size_t>(i)]) continue;
    entry->operands.push_back(i);
    options.training |= request.needs_grad[static_cast<size_t>(i)];
  }
  // Results lie as the query does, so that (batch, length, heads, dim) callers view them without a copy; the result that
  // the backward reads is the caller's own tensor, kept by autograd.
  options.free_layouts = options.share_outputs = true;
  options.deterministic = request.options.deterministic;
  options.target = target_of(nb::none(), request.views[sdpa_query].device);
  std::shared_ptr<const CompiledTrace> compiled;
  std::shared_ptr<const UnsupportedError> refused;
  try {
    compiled = compile_trace(trace, options);
  } catch (const UnsupportedError&) {
    nb::gil_scoped_release unlocked;  // an executor's own lock may be held by a thread that waits for the GIL
    refused = std::make_shared<const UnsupportedError>(refusal_of(trace, options));
  }
  if (compiled) entry->compiled = std::make_unique<const Compiled>(std::move(compiled), options.target);
  if (options.training && options.target.kind == DeviceKind::cuda) {
    entry->trace_ = trace;
    entry->options_ = options;
  }
  ++builds;
  if (const auto at = entries_.find(key); at != entries_.end()) return entry_of(*at->second);  // another thread was faster
  order_.push_front({key, executors, entry, std::move(refused)});
  entries_.emplace(key, order_.begin());
  while (entries_.size() > limit_) {
    entries_.erase(order_.back().key);
    order_.pop_back();
    ++dropped;
  }
  return entry_of(order_.front());
}

void SdpaCache::clear() {
  entries_.clear();
  order_.clear();
}

}  // namespace fulmen::python
