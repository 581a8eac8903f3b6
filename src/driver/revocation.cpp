#include "driver/revocation.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <mutex>

#include "core/error.h"
#include "driver/audit.h"
#include "driver/compile.h"
#include "ir/print.h"

namespace fulmen {
namespace {

std::mutex handler_mutex;
std::function<void(const std::string&)> handler;
std::atomic<int> revocations{0};

// The node alone, as a trace: what the replacement is compiled from.
Trace single_node_trace(const Trace& trace, const Node& node) {
  if (node.body) return *node.body;
  Trace single;
  single.name = node.op->name;
  Node copy = node;
  copy.executor.clear();
  copy.plan.reset();
  for (ValueId& id : copy.inputs)
    if (id != no_value) id = single.add_input(trace.type(id), trace.value(id).name);
  for (ValueId& id : copy.outputs) {
    if (id == no_value) continue;
    const TensorType& type = trace.type(id);
    id = single.add_value(contiguous_type(type.dtype, type.shape, type.device), trace.value(id).name);
    single.outputs.push_back(id);
  }
  single.nodes.push_back(std::move(copy));
  for (Value& value : single.values) value.type.requires_grad = false;
  return single;
}

class RevocableKernel : public Kernel {
 public:
  RevocableKernel(const Trace& trace, const Node& node, const std::shared_ptr<const Executor>& executor, const ExecutorList& executors,
                  const Target& target)
      : text_(to_string(trace, node)), executor_name_(executor->name()), single_(single_node_trace(trace, node)), target_(target) {
    for (const auto& other : executors)
      if (other != executor) rest_.push_back(other);
    for (ValueId id : node.inputs) input_given_.push_back(id != no_value);
    for (ValueId id : node.outputs) output_types_.push_back(id == no_value ? TensorType{} : trace.type(id));
    for (ValueId id : node.outputs) output_given_.push_back(id != no_value);
    try {
      const Call call = call_of(trace, node);
      kernel_ = executor->make_kernel(call, *static_cast<const Plan*>(node.plan.get()), target);
    } catch (const DeviceError& error) {
      revoke(error.what());
    }
  }

  size_t workspace_bytes() const override { return kernel_ ? kernel_->workspace_bytes() : 0; }

  void run(const RunContext& context, const void* const* inputs, void* const* outputs) const override {
    if (!revoked_.load(std::memory_order_acquire)) {
      try {
        const std::unique_ptr<AuditSample> sample =
            audit_enabled() ? AuditSample::take(single_, rest_, executor_name_, target_, context, given_inputs(inputs)) : nullptr;
        kernel_->run(context, inputs, outputs);
        if (!sample) return;
        const std::string wrong = sample->compare(given_results(outputs), given_types());
        if (wrong.empty()) return;
        revoke("an audit found it wrong: " + wrong);
      } catch (const DeviceError& error) {
        revoke(error.what());
      }
    }
    run_replacement(context, inputs, outputs);
  }

 private:
  void revoke(const std::string& why) const {
    std::lock_guard lock(mutex_);
    if (replacement_) return;
    if (no_replacement_.empty()) {
      ++revocations;
      CompileOptions options;
      options.executors = rest_;
      options.target = target_;
      try {
        replacement_ = compile(single_, options);
      } catch (const UnsupportedError& error) {
        no_replacement_ = executor_name_ + " failed on " + text_ + ": " + why + "; the claim is revoked for this call, and no other executor takes it";
        revoked_.store(true, std::memory_order_release);
      }
    }
    if (!no_replacement_.empty()) throw UnsupportedError(no_replacement_);
    std::string winner = "nothing";
    for (const auto& instruction : replacement_->forward.instructions()) winner = instruction.executor;
    warn(executor_name_ + " failed on " + text_ + ": " + why + "; the claim is revoked for this call, " + winner + " runs it from now on");
    revoked_.store(true, std::memory_order_release);
  }

  // The operands that are given, in the order of single_'s inputs.
  std::vector<const void*> given_inputs(const void* const* inputs) const {
    std::vector<const void*> in;
    for (size_t i = 0; i < input_given_.size(); ++i)
      if (input_given_[i]) in.push_back(inputs[i]);
    return in;
  }

  std::vector<const void*> given_results(void* const* outputs) const {
    std::vector<const void*> results;
    for (size_t i = 0; i < output_given_.size(); ++i)
      if (output_given_[i]) results.push_back(outputs[i]);
    return results;
  }

  std::vector<TensorType> given_types() const {
    std::vector<TensorType> types;
    for (size_t i = 0; i < output_given_.size(); ++i)
      if (output_given_[i]) types.push_back(output_types_[i]);
    return types;
  }

  void run_replacement(const RunContext& context, const void* const* inputs, void* const* outputs) const {
    if (!replacement_) throw UnsupportedError(no_replacement_);
    const Program& program = replacement_->forward;
    const std::vector<const void*> in = given_inputs(inputs);
    // Results are computed contiguous and then laid out as the program wants them.
    std::vector<std::unique_ptr<char[]>> temporary;
    std::vector<void*> out;
    for (size_t i = 0; i < output_given_.size(); ++i) {
      if (!output_given_[i]) continue;
      if (output_types_[i].is_contiguous()) {
        out.push_back(outputs[i]);
      } else {
        temporary.push_back(std::make_unique<char[]>(output_types_[i].bytes()));
        out.push_back(temporary.back().get());
      }
    }
    void* arena = program.arena_bytes() ? std::aligned_alloc(64, (program.arena_bytes() + 63) / 64 * 64) : nullptr;
    const std::unique_ptr<void, void (*)(void*)> owner(arena, std::free);
    program.run(context, in.data(), out.data(), arena);
    size_t next = 0;
    for (size_t i = 0; i < output_given_.size(); ++i) {
      if (!output_given_[i] || output_types_[i].is_contiguous()) continue;
      copy_strided(temporary[next++].get(), output_types_[i], static_cast<char*>(outputs[i]));
    }
  }

  static void copy_strided(const char* from, const TensorType& type, char* to) {
    const size_t size = dtype_bytes(type.dtype);
    Dims index(type.shape.size(), 0);
    for (int64_t k = 0, count = type.element_count(); k < count; ++k) {
      int64_t offset = 0;
      for (size_t d = 0; d < index.size(); ++d) offset += index[d] * type.strides[d];
      std::copy(from + static_cast<size_t>(k) * size, from + static_cast<size_t>(k + 1) * size, to + static_cast<size_t>(offset) * size);
      for (size_t d = index.size(); d-- > 0;) {
        if (++index[d] < type.shape[d]) break;
        index[d] = 0;
      }
    }
  }

  std::string text_, executor_name_;
  Trace single_;
  Target target_;
  ExecutorList rest_;
  std::vector<bool> input_given_, output_given_;
  std::vector<TensorType> output_types_;
  std::unique_ptr<Kernel> kernel_;
  mutable std::mutex mutex_;
  mutable std::atomic<bool> revoked_{false};
  mutable std::shared_ptr<const CompiledTrace> replacement_;
  mutable std::string no_replacement_;  // the error of a claim that was revoked and that nobody else takes
};

}  // namespace

std::shared_ptr<const Kernel> make_revocable_kernel(const Trace& trace, const Node& node, const std::shared_ptr<const Executor>& executor,
                                                    const ExecutorList& executors, const Target& target) {
  return std::make_shared<RevocableKernel>(trace, node, executor, executors, target);
}

void set_warning_handler(std::function<void(const std::string&)> wanted) {
  std::lock_guard lock(handler_mutex);
  handler = std::move(wanted);
}

void warn(const std::string& message) {
  std::function<void(const std::string&)> current;
  {
    std::lock_guard lock(handler_mutex);
    current = handler;
  }
  if (current)
    current(message);
  else
    std::fprintf(stderr, "fulmen: warning: %s\n", message.c_str());
}

int revocation_count() { return revocations.load(); }

}  // namespace fulmen
