#include "conformance/check_executor.h"

#include <algorithm>
#include <map>

#include "conformance/compare.h"
#include "conformance/inspect_call.h"
#include "conformance/sample_call.h"
#include "core/error.h"
#include "executors/reference/evaluate.h"
#include "ops/reference_loops.h"
#include "ops/sdpa_call.h"
#include "passes/claim_nodes.h"
#include "passes/decompose.h"
#include "passes/differentiate.h"

namespace fulmen::conformance {
namespace {

// A sample as it is offered: other dtypes, other layouts.
struct Form {
  std::string name;
  Sample sample;
};

// The strides of a contiguous tensor's elements in another layout; the own ones where it makes no difference.
Dims strides_in(const std::string& layout, const TensorType& type) {
  Dims strides = type.strides;
  if (layout == "row gaps" && type.rank() > 0) {
    Dims roomy = type.shape;
    for (int64_t& size : roomy) size = std::max<int64_t>(size, 1);
    roomy.back() += 3;
    strides = contiguous_strides(roomy);
    if (type.rank() == 1) strides = {3};
  } else if (layout == "columns first") {
    const Dims reversed = contiguous_strides(Dims(type.shape.rbegin(), type.shape.rend()));
    strides = Dims(reversed.rbegin(), reversed.rend());
  } else if (layout == "stride 0" && is_float(type.dtype)) {
    for (size_t d = 0; d < type.shape.size(); ++d)
      if (type.shape[d] > 1) {
        strides[d] = 0;
        break;
      }
  }
  return strides;
}

std::vector<Form> forms_of(const Sample& sample, const CheckOptions& options) {
  std::vector<Form> forms{{"", sample}};
  for (const DType dtype : options.dtypes) {
    Form form{std::string(dtype_name(dtype)), sample};
    bool changed = false;
    for (std::string& spec : form.sample.inputs)
      if (spec.starts_with("f32[")) spec = form.name + spec.substr(3), changed = true;
    if (changed) forms.push_back(std::move(form));
  }
  if (!options.layouts) return forms;
  for (const char* layout : {"row gaps", "columns first", "stride 0"}) {
    Form form{layout, sample};
    bool changed = false;
    for (std::string& spec : form.sample.inputs) {
      if (spec == "none") continue;
      TensorType type = parse_tensor_spec(spec);
      if (!type.is_contiguous()) continue;
      const Dims strides = strides_in(layout, type);
      if (strides == type.strides) continue;
      type.strides = strides;
      spec = to_string(type);
      changed = true;
    }
    if (changed) forms.push_back(std::move(form));
  }
  return forms;
}

// The trace of a form; nothing if the op doesn't take these dtypes.
std::optional<Trace> trace_of_form(const OpDef& op, const Form& form, Marks marks) {
  try {
    return trace_of(op, form.sample, marks);
  } catch (const Error&) {
    if (form.name.empty()) throw;
    return std::nullopt;
  }
}

std::vector<const HostTensor*> operands_of(const Node& node, const std::vector<HostTensor>& values) {
  std::vector<const HostTensor*> operands;
  for (ValueId id : node.inputs) operands.push_back(id == no_value ? nullptr : &values[static_cast<size_t>(id)]);
  return operands;
}

class OpChecker {
 public:
  OpChecker(const std::shared_ptr<const Executor>& executor, const OpDef& op, const CheckOptions& options)
      : executor_(executor), op_(op), options_(options) {}

  Report check() {
    for (const Sample& sample : op_.samples.good) {
      for (const Form& form : forms_of(sample, options_)) check_form(form, name_of(sample, form.name));
      if (options_.gradients) check_gradient(sample);
    }
    report_.refusals.assign(refusals_.begin(), refusals_.end());
    return std::move(report_);
  }

 private:
  std::string name_of(const Sample& sample, const std::string& form) const {
    return op_.name + "/" + sample.name + (form.empty() ? "" : " (" + form + ")");
  }

  // The compiler brings attention to four dims before it asks.
  bool is_offered(const Trace& trace) const { return op_.name != "sdpa" || is_canonical_sdpa(trace, trace.nodes[0]); }

  void check_form(const Form& form, const std::string& name) {
    const std::optional<Trace> trace = trace_of_form(op_, form, Marks::none);
    if (!trace || !is_offered(*trace)) return;
    ++report_.calls;
    CallInspector inspector(*executor_, options_.target, report_, name, *trace);
    const Call call = call_of(*trace, trace->nodes[0]);
    const std::optional<Plan> plan = inspector.ask(call);
    if (!plan) {
      count_refusal(call);
      return;
    }
    ++report_.claimed;
    // A claim of sdpa means the pair, and sdpa_backward reads what its own forward saved: both run in check_gradient.
    if (op_.name == "sdpa" || op_.name == "sdpa_backward") return;
    const std::vector<HostTensor> values = values_of(op_, form.sample, *trace);
    std::vector<const HostTensor*> operands;
    size_t next = 0;
    for (const TensorType* type : call.inputs) operands.push_back(type ? &values[next++] : nullptr);
    const auto results = inspector.run(call, *plan, operands);
    if (!results) return;
    const auto exact = evaluate(*trace, values), rounded = evaluate(*trace, values, {.round = true});
    next = 0;
    for (size_t i = 0; i < results->size(); ++i) {
      if (!call.outputs[i]) continue;
      const std::string wrong = difference((*results)[i], exact[next], rounded[next]);
      ++next;
      if (wrong.empty()) continue;
      inspector.fault("numbers", "result " + std::to_string(i) + ": " + wrong);
      break;
    }
  }

  void count_refusal(const Call& call) {
    try {
      const Claim claim = executor_->claim(call, options_.target);
      if (const auto* refusal = std::get_if<Refusal>(&claim)) ++refusals_[std::string(code_name(refusal->code))];
    } catch (const std::exception&) {  // reported already
    }
  }

  // The sample's program with gradients, every node that the executor claims run by it, the others by the reference.
  void check_gradient(const Sample& sample) {
    const Trace plain = trace_of(op_, sample, gradient_marks(sample));
    if (!is_offered(plain)) return;
    const std::string name = name_of(sample, "gradient");
    CallInspector inspector(*executor_, options_.target, report_, name, plain);
    Trace claimed;
    JointTrace joint, expected;
    const auto keep = [](const Trace&, const Node& node) { return !node.executor.empty() || !std::holds_alternative<ByDecomposition>(op_of(node).gradient); };
    try {
      const bool pair = op_.name == "sdpa";
      if (pair) inspector.ask(call_of(plain, plain.nodes[0], true));
      claimed = claim_pairs(plain, {executor_}, options_.target, true, false, nullptr);
      if (pair && claimed.nodes[0].plan && !std::static_pointer_cast<const Plan>(claimed.nodes[0].plan)->backward) return;  // reported by ask
      joint = differentiate(decompose(claimed, keep));
      expected = differentiate(decompose(plain, keep));
    } catch (const UnsupportedError&) {
      return;
    } catch (const InternalError&) {  // of the claim: reported by ask
      return;
    }
    if (joint.inputs_with_grad.empty()) return;
    std::vector<HostTensor> inputs = values_of(op_, sample, plain);
    for (size_t k = 0; k < joint.grad_outputs.size(); ++k) {
      const TensorType& type = plain.type(plain.outputs[static_cast<size_t>(joint.grad_outputs[k])]);
      inputs.push_back(normal_values(type, 100 + k));
      for (double& element : inputs.back().f) element = round_float(element, type.dtype);
    }
    const auto found = run_joint(joint.trace, inputs, inspector);
    if (!found) return;
    ++report_.gradients;
    const auto exact = evaluate(expected.trace, inputs), rounded = evaluate(expected.trace, inputs, {.round = true});
    const auto first = static_cast<size_t>(joint.output_count);
    for (size_t g = 0; g < joint.inputs_with_grad.size(); ++g) {
      const std::string wrong = difference((*found)[first + g], exact[first + g], rounded[first + g], gradient_slack);
      if (wrong.empty()) continue;
      inspector.fault("gradient", "the gradient of operand " + plain.value(plain.inputs[static_cast<size_t>(joint.inputs_with_grad[g])]).name + ": " + wrong);
      return;
    }
  }

  // Outputs of the trace; nothing if the executor ran none of its nodes, or could not.
  std::optional<std::vector<HostTensor>> run_joint(const Trace& trace, const std::vector<HostTensor>& inputs, CallInspector& inspector) {
    std::vector<HostTensor> values(trace.values.size());
    for (size_t i = 0; i < inputs.size(); ++i) values[static_cast<size_t>(trace.inputs[i])] = inputs[i];
    bool ran_any = false;
    for (const Node& node : trace.nodes) {
      const Call call = call_of(trace, node);
      const std::vector<const HostTensor*> operands = operands_of(node, values);
      std::optional<Plan> plan;
      if (node.plan)
        plan = *std::static_pointer_cast<const Plan>(node.plan);
      else if (node.op->name != "sdpa_backward")  // it reads what its own forward saved
        plan = inspector.ask(call);
      std::vector<HostTensor> results;
      if (plan) {
        ran_any = true;
        auto made = inspector.run(call, *plan, operands);
        if (!made) return std::nullopt;
        results = std::move(*made);
      } else {
        results = evaluate_node(trace, node, operands, {.round = true});
      }
      for (size_t i = 0; i < node.outputs.size(); ++i)
        if (node.outputs[i] != no_value) values[static_cast<size_t>(node.outputs[i])] = std::move(results[i]);
    }
    if (!ran_any) return std::nullopt;
    std::vector<HostTensor> outputs;
    for (ValueId id : trace.outputs) outputs.push_back(id == no_value ? HostTensor{} : values[static_cast<size_t>(id)]);
    return outputs;
  }

  // A gradient is several calls, and each has its own budget; those of attention pass through exponentials.
  static constexpr double gradient_slack = 8;

  std::shared_ptr<const Executor> executor_;
  const OpDef& op_;
  const CheckOptions& options_;
  Report report_;
  std::map<std::string, int64_t> refusals_;
};

}  // namespace

void Report::join(const Report& other) {
  calls += other.calls;
  claimed += other.claimed;
  gradients += other.gradients;
  for (const auto& [code, count] : other.refusals) {
    const auto same = std::find_if(refusals.begin(), refusals.end(), [&](const auto& entry) { return entry.first == code; });
    if (same == refusals.end())
      refusals.emplace_back(code, count);
    else
      same->second += count;
  }
  faults.insert(faults.end(), other.faults.begin(), other.faults.end());
}

Report check_op(const std::shared_ptr<const Executor>& executor, const OpDef& op, const CheckOptions& options) {
  return OpChecker(executor, op, options).check();
}

Report check_executor(const std::shared_ptr<const Executor>& executor, const CheckOptions& options) {
  Report report;
  for (const OpDef* op : all_ops()) report.join(check_op(executor, *op, options));
  return report;
}

}  // namespace fulmen::conformance
