#include "passes/claim_nodes.h"

#include "ir/print.h"
#include "ops/builder.h"
#include "ops/sdpa_call.h"
#include "ops/table.h"
#include "passes/substitution.h"

namespace fulmen {
namespace {

ClaimOutcome ask(const Trace& trace, const Node& node, const ExecutorList& executors, const Target& target, bool training,
                 bool deterministic, std::string_view direction, std::vector<NodeClaim>* records) {
  Call call = call_of(trace, node, training);
  call.deterministic = deterministic;
  ClaimOutcome outcome = claim_call(call, executors, target);
  if (records) {
    NodeClaim record;
    record.node = to_string(trace, node);
    record.op = node.op->name;
    record.direction = direction;
    record.answers = outcome.answers;
    records->push_back(std::move(record));
  }
  return outcome;
}

}  // namespace

Trace claim_pairs(const Trace& trace, const ExecutorList& executors, const Target& target, bool training, bool deterministic,
                  std::vector<NodeClaim>* records) {
  const OpDef& pair_forward = require_op("sdpa_forward");
  Trace out = trace;
  out.nodes.clear();
  Builder builder(out);
  Substitution substitution;
  for (Node node : trace.nodes) {
    substitution.apply(node.inputs);
    // Calls in another form than four dims were brought there before (the decomposition of such an sdpa node).
    if (node.op->name != "sdpa" || !is_canonical_sdpa(out, node)) {
      out.nodes.push_back(std::move(node));
      continue;
    }
    bool needs_grad = false;
    for (ValueId id : node.inputs) needs_grad |= id != no_value && out.type(id).requires_grad;
    const ClaimOutcome outcome =
        ask(out, node, executors, target, training && needs_grad, deterministic, training && needs_grad ? "forward+backward" : "forward", records);
    if (!outcome.winner) {
      out.nodes.push_back(std::move(node));
      continue;
    }
    Attributes attrs;
    for (const AttrDef& def : pair_forward.attributes)
      if (const AttrValue* value = node.attrs.find(def.name)) attrs.set(def.name, *value);
    const auto results = builder.emit("sdpa_forward", node.inputs, attrs);
    Node& made = out.nodes.back();
    made.executor = outcome.winner->name();
    made.plan = outcome.plan;
    for (size_t i = 0; i < node.outputs.size(); ++i) substitution.replace(node.outputs[i], results[i]);
  }
  substitution.apply(out.outputs);
  return out;
}

Trace claim_nodes(const Trace& trace, const ExecutorList& executors, const Target& target, bool deterministic,
                  std::string_view direction, std::vector<NodeClaim>* records) {
  Trace out = trace;
  for (Node& node : out.nodes) {
    if (!node.executor.empty()) continue;
    const ClaimOutcome outcome = ask(out, node, executors, target, false, deterministic, direction, records);
    if (!outcome.winner) throw unclaimed(node.op->name, outcome.answers, "\n  in " + to_string(out, node));
    node.executor = outcome.winner->name();
    node.plan = outcome.plan;
  }
  return out;
}

}  // namespace fulmen
