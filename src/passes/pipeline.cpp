#include "passes/pipeline.h"

#include <algorithm>
#include <chrono>
#include <unordered_set>

#include "core/error.h"
#include "ir/print.h"
#include "ir/verify.h"
#include "passes/alias_views.h"
#include "passes/bring_attention_to_four_dims.h"
#include "passes/decompose.h"
#include "passes/fuse.h"
#include "passes/join_slice_gradients.h"
#include "passes/merge_equal_nodes.h"
#include "passes/remove_dead_nodes.h"
#include "passes/simplify.h"

namespace fulmen {

const std::vector<std::string>& optional_passes() {
  static const std::vector<std::string> names = {"simplify", "merge_equal_nodes", "remove_dead_nodes", "claim_pairs", "join_slice_gradients", "fuse"};
  return names;
}

Trace PassRunner::run(std::string_view name, const Trace& trace, const std::function<Trace(const Trace&)>& pass, bool optional) {
  if (optional && std::find(skip_.begin(), skip_.end(), name) != skip_.end()) return trace;
  const auto start = std::chrono::steady_clock::now();
  Trace result = pass(trace);
  const double ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
  verify(result, name);
  std::string record = std::string(name) + (scope_.empty() ? "" : " (" + scope_ + ")");
  const auto is_taken = [&] { return std::any_of(records_.begin(), records_.end(), [&](const Record& r) { return r.name == record; }); };
  for (int time = 2; is_taken(); ++time)
    record = std::string(name) + " (" + (scope_.empty() ? "" : scope_ + ", ") + std::to_string(time) + ")";
  note(record, result, ms);
  return result;
}

void PassRunner::note(std::string_view name, const Trace& trace, double ms) {
  records_.push_back({std::string(name), ms, keep_texts_ ? to_string(trace) : std::string()});
}

namespace {

Trace canonicalise(Trace trace, PassRunner& runner) {
  trace = runner.run("simplify", trace, simplify);
  trace = runner.run("merge_equal_nodes", trace, merge_equal_nodes);
  return runner.run("remove_dead_nodes", trace, remove_dead_nodes);
}

bool has_own_gradient(const Trace&, const Node& node) {
  return !node.executor.empty() || !std::holds_alternative<ByDecomposition>(op_of(node).gradient);
}

bool is_claimed(const Trace& trace, const Node& node, const PipelineOptions& options) {
  if (!node.executor.empty()) return true;
  Call call = call_of(trace, node);
  call.deterministic = options.deterministic;
  return claim_call(call, options.executors, options.target).winner != nullptr;
}

// Composites that an executor claims, now or already, stay whole, but for those that make a value of `refused`.
Trace decompose_unclaimed(const Trace& trace, const PipelineOptions& options, const std::unordered_set<ValueId>& refused = {}) {
  return decompose(trace, [&](const Trace& now, const Node& node) {
    return (node.outputs.empty() || !refused.count(node.outputs[0])) && is_claimed(now, node, options);
  });
}

// The first results of composites that were claimed with contiguous operands and that nobody claims as their operands lie
// now that some of them are views.
std::unordered_set<ValueId> refused_as_laid_out(const Trace& trace, const PipelineOptions& options) {
  std::unordered_set<ValueId> refused;
  for (const Node& node : trace.nodes) {
    if (!node.executor.empty() || !std::holds_alternative<Decomposition>(op_of(node).meaning)) continue;
    const bool strided = std::any_of(node.inputs.begin(), node.inputs.end(), [&](ValueId id) {
      return id != no_value && !trace.type(id).is_contiguous();
    });
    if (strided && !is_claimed(trace, node, options)) refused.insert(node.outputs[0]);
  }
  return refused;
}

// The second half, the same for both directions: from a trace with nothing but forward semantics to claimed nodes.
Trace lower(Trace trace, const PipelineOptions& options, std::string_view direction, size_t contiguous_outputs, PassRunner& runner,
            std::vector<NodeClaim>& claims) {
  runner.enter(direction);
  // Whole composites first: an executor that has a kernel for one should see it before it falls apart.
  trace = runner.run("decompose", trace, [&](const Trace& t) { return decompose_unclaimed(t, options); }, false);
  trace = canonicalise(std::move(trace), runner);
  // Views before fusion: a fusion reads its operands by their strides.
  while (true) {
    Trace viewed = alias_views(trace, options.free_layouts ? 0 : contiguous_outputs, options.free_layouts);
    const std::unordered_set<ValueId> refused = refused_as_laid_out(viewed, options);
    if (refused.empty()) {
      trace = runner.run("alias_views", viewed, [](const Trace& t) { return t; }, false);
      break;
    }
    trace = runner.run("decompose", trace, [&](const Trace& t) { return decompose_unclaimed(t, options, refused); }, false);
    trace = canonicalise(std::move(trace), runner);
  }
  // Claims before fusion, so that an executor that stands earlier in the list keeps what it claims; fusion joins
  // neighbours of one executor and claims the whole.
  trace = runner.run("claim_nodes", trace, [&](const Trace& t) {
    return claim_nodes(t, options.executors, options.target, options.deterministic, direction, &claims);
  }, false);
  trace = runner.run("fuse", trace, [&](const Trace& t) { return fuse(t, options.executors, options.target); });
  return runner.run("remove_dead_nodes", trace, remove_dead_nodes);
}

}  // namespace

PipelineResult run_pipeline(const Trace& acquired, const PipelineOptions& options, PassRunner& runner) {
  PipelineResult result;
  runner.note("acquire", acquired);
  // Canonical form first: everything behind sees each computation once.
  Trace trace = canonicalise(acquired, runner);
  // Attention in the one form that executors' pairs take: four dims, one batch size.
  trace = runner.run("bring_attention_to_four_dims", trace, bring_attention_to_four_dims, false);
  // Attention is claimed before differentiation, as a pair that keeps its own statistics.
  trace = runner.run("claim_pairs", trace, [&](const Trace& t) {
    return claim_pairs(t, options.executors, options.target, options.training, options.deterministic, &result.claims);
  });
  const bool wants_grad = options.training && std::any_of(trace.inputs.begin(), trace.inputs.end(), [&](ValueId id) {
    return trace.type(id).requires_grad;
  });
  if (!wants_grad) {
    result.output_count = static_cast<int>(trace.outputs.size());
    result.forward = lower(std::move(trace), options, "forward", all_outputs, runner, result.claims);
    return result;
  }
  // Composites without a gradient rule of their own are differentiated through their parts.
  trace = runner.run("decompose_for_gradient", trace, [](const Trace& t) { return decompose(t, has_own_gradient); }, false);
  JointTrace joint;
  runner.run("differentiate", trace, [&](const Trace& t) {
    joint = differentiate(t);
    return joint.trace;
  }, false);
  // Jointly, so that what a gradient rule writes again is found in the forward. Composites that stay whole stay so until
  // their direction is lowered; the others come apart here, or the cut could not choose among their parts.
  runner.enter("joint");
  joint.trace = runner.run("decompose", joint.trace, [&](const Trace& t) { return decompose_unclaimed(t, options); }, false);
  joint.trace = canonicalise(std::move(joint.trace), runner);
  // After the adds of gradients stand side by side, before the cut counts bytes.
  joint.trace = runner.run("join_slice_gradients", joint.trace, join_slice_gradients);
  joint.trace = runner.run("remove_dead_nodes", joint.trace, remove_dead_nodes);
  SplitTrace halves = split(joint);
  verify(halves.forward, "split");
  verify(halves.backward, "split");
  runner.note("split: forward", halves.forward);
  runner.note("split: backward", halves.backward);
  result.output_count = halves.output_count;
  result.saved_inputs = halves.saved_inputs;
  result.grad_outputs = joint.grad_outputs;
  result.inputs_with_grad = joint.inputs_with_grad;
  result.saved_bytes = halves.saved_bytes;
  const auto output_count = static_cast<size_t>(halves.output_count);
  // A saved value that is a result too needn't be written twice, where the caller keeps results for the backward.
  auto& forward_outputs = halves.forward.outputs;
  for (size_t i = output_count; i < forward_outputs.size();) {
    const auto same = std::find(forward_outputs.begin(), forward_outputs.begin() + halves.output_count, forward_outputs[i]);
    const bool shared = options.share_outputs && same != forward_outputs.begin() + halves.output_count;
    result.saved_from_output.push_back(shared ? static_cast<int>(same - forward_outputs.begin()) : -1);
    if (shared) {
      result.saved_bytes -= halves.forward.type(forward_outputs[i]).bytes();
      forward_outputs.erase(forward_outputs.begin() + static_cast<std::ptrdiff_t>(i));
    } else {
      ++i;
    }
  }
  result.forward = lower(std::move(halves.forward), options, "forward", output_count, runner, result.claims);
  // The backward reads saved values as the forward laid them out.
  size_t next = output_count;
  for (size_t k = 0; k < result.saved_from_output.size(); ++k) {
    const int from = result.saved_from_output[k];
    const ValueId written = result.forward.outputs[from >= 0 ? static_cast<size_t>(from) : next++];
    halves.backward.value(halves.backward.inputs[halves.saved_inputs.size() + k]).type.strides = result.forward.type(written).strides;
  }
  if (options.free_layouts) {
    const size_t first = halves.backward.inputs.size() - joint.grad_outputs.size();
    for (size_t k = 0; k < joint.grad_outputs.size(); ++k) {
      const ValueId output = result.forward.outputs[static_cast<size_t>(joint.grad_outputs[k])];
      const auto place = static_cast<size_t>(joint.grad_outputs[k]);
      const bool given = options.grad_layouts && place < options.grad_layouts->size() && (*options.grad_layouts)[place];
      halves.backward.value(halves.backward.inputs[first + k]).type.strides =
          given ? *(*options.grad_layouts)[place] : result.forward.type(output).strides;
    }
  }
  result.backward = lower(std::move(halves.backward), options, "backward", all_outputs, runner, result.claims);
  return result;
}

}  // namespace fulmen
