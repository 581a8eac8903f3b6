// The public C++ claims (include/fulmen/claims.h): an attention call is recorded, brought to its canonical form and
// offered to every executor of the default list; nothing runs.
#include <algorithm>

#include "claiming/claim.h"
#include "claiming/targets.h"
#include "driver/compile.h"
#include "executors/default_list.h"
#include "fulmen/claims.h"
#include "ops/builder.h"
#include "passes/alias_views.h"
#include "passes/bring_attention_to_four_dims.h"

namespace fulmen {
namespace {

Device device_of(const Target& target) { return {target.kind, target.device_index}; }

ValueId add_operand(Trace& trace, const std::string& spec, const char* name, const Target& target, bool wants_grad) {
  if (spec.empty()) return no_value;
  TensorType type = parse_tensor_spec(spec);
  type.device = device_of(target);
  type.requires_grad |= wants_grad;
  return trace.add_input(type, name);
}

ExecutorAnswer answer_of(const ClaimAnswer& given) {
  ExecutorAnswer answer;
  answer.executor = given.executor;
  if (const auto* refusal = std::get_if<Refusal>(&given.claim)) {
    answer.code = code_name(refusal->code);
    answer.reason = refusal->reason;
    return answer;
  }
  const Plan& plan = std::get<Plan>(given.claim);
  answer.claimed = true;
  answer.deterministic = plan.deterministic;
  answer.forward_kernel = plan.forward.kernel;
  answer.workspace_bytes = plan.forward.workspace_bytes;
  if (plan.backward) {
    answer.backward_kernel = plan.backward->kernel;
    answer.workspace_bytes = std::max(answer.workspace_bytes, plan.backward->workspace_bytes);
  }
  return answer;
}

}  // namespace

std::vector<ExecutorAnswer> claims(const AttentionQuestion& question) {
  const Target target = find_target(question.target);
  Trace trace;
  const ValueId query = add_operand(trace, question.query, "query", target, question.training);
  const ValueId key = add_operand(trace, question.key, "key", target, question.training);
  const ValueId value = add_operand(trace, question.value, "value", target, question.training);
  if (query == no_value || key == no_value || value == no_value)
    throw ShapeError("claims: query, key and value must be tensor specs such as bf16[2,32,4096,128]");
  const ValueId mask = add_operand(trace, question.mask, "mask", target, false);
  ValueId seed = no_value;
  if (question.dropout_p > 0) seed = trace.add_input(contiguous_type(DType::i64, {2}, device_of(target)), "seed");
  Attributes attrs{{"is_causal", question.is_causal}, {"dropout_p", question.dropout_p}, {"enable_gqa", question.enable_gqa}};
  if (question.has_scale) attrs.set("scale", question.scale);
  Builder builder(trace);
  trace.outputs = builder.emit("sdpa", {query, key, value, mask, no_value, no_value, no_value, no_value, no_value, seed}, attrs);
  const Trace settled = alias_views(bring_attention_to_four_dims(trace));

  std::vector<ExecutorAnswer> answers;
  for (const Node& node : settled.nodes) {
    if (node.op->name != "sdpa") continue;
    Call call = call_of(settled, node, question.training);
    call.deterministic = question.deterministic;
    for (const ClaimAnswer& answer : claim_call(call, default_executors(), target, true).answers) answers.push_back(answer_of(answer));
    break;
  }
  return answers;
}

}  // namespace fulmen
