#include "claiming/claim.h"

namespace fulmen {

std::string_view code_name(RefusalCode code) {
  switch (code) {
    case RefusalCode::unavailable: return "unavailable";
    case RefusalCode::prerequisite_missing: return "prerequisite_missing";
    case RefusalCode::not_implemented: return "not_implemented";
    case RefusalCode::wrong_device: return "wrong_device";
    case RefusalCode::wrong_dtype: return "wrong_dtype";
    case RefusalCode::wrong_shape: return "wrong_shape";
    case RefusalCode::wrong_layout: return "wrong_layout";
    case RefusalCode::degenerate: return "degenerate";
    case RefusalCode::too_large: return "too_large";
    case RefusalCode::unsupported_argument: return "unsupported_argument";
    case RefusalCode::forward_unsupported: return "forward_unsupported";
    case RefusalCode::backward_unsupported: return "backward_unsupported";
    case RefusalCode::not_deterministic: return "not_deterministic";
    case RefusalCode::known_fault: return "known_fault";
    case RefusalCode::not_worth_it: return "not_worth_it";
    case RefusalCode::revoked: return "revoked";
  }
  return "unknown";
}

Call call_of(const Trace& trace, const Node& node, bool training) {
  Call call;
  call.op = &op_of(node);
  for (ValueId id : node.inputs) call.inputs.push_back(id == no_value ? nullptr : &trace.type(id));
  for (ValueId id : node.outputs) call.outputs.push_back(id == no_value ? nullptr : &trace.type(id));
  call.attrs = &node.attrs;
  call.body = node.body.get();
  call.training = training;
  return call;
}

ClaimOutcome claim_call(const Call& call, const ExecutorList& executors, const Target& target, bool ask_all) {
  ClaimOutcome outcome;
  for (const auto& executor : executors) {
    Claim claim = Refusal{RefusalCode::unavailable, ""};
    const std::string missing = target.described ? std::string() : executor->unavailable_reason();
    if (missing.empty())
      claim = executor->claim(call, target);
    else
      std::get<Refusal>(claim).reason = std::string(call.op->name) + ": " + missing;
    outcome.answers.push_back({std::string(executor->name()), std::move(claim)});
    if (!outcome.winner && is_claimed(outcome.answers.back().claim)) {
      outcome.winner = executor.get();
      outcome.plan = std::make_shared<const Plan>(std::get<Plan>(outcome.answers.back().claim));
      if (!ask_all) break;
    }
  }
  return outcome;
}

UnsupportedError unclaimed(std::string_view op, const std::vector<ClaimAnswer>& answers, const std::string& where) {
  std::string text = std::string(op) + ": no executor claims it";
  if (answers.empty()) text += " (the executor list is empty)";
  for (const ClaimAnswer& answer : answers)
    if (const auto* refusal = std::get_if<Refusal>(&answer.claim))
      text += "\n  " + answer.executor + ": " + refusal->reason + " [" + std::string(code_name(refusal->code)) + "]";
  UnsupportedError error(text + where);
  for (const ClaimAnswer& answer : answers)
    if (const auto* refusal = std::get_if<Refusal>(&answer.claim))
      error.refusals.push_back({answer.executor, std::string(code_name(refusal->code)), refusal->reason});
  return error;
}

}  // namespace fulmen
