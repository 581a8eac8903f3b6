// Claims for one call: every executor of the list is asked, nothing is run.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"
#include "claiming/claim.h"
#include "core/error.h"
#include "ops/sdpa_call.h"
#include "passes/alias_views.h"
#include "passes/bring_attention_to_four_dims.h"

namespace fulmen::python {
namespace {

Answer answer_of(const ClaimAnswer& given) {
  Answer answer;
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
  answer.forward_workspace_bytes = plan.forward.workspace_bytes;
  if (plan.backward) {
    answer.has_backward = true;
    answer.backward_kernel = plan.backward->kernel;
    answer.backward_workspace_bytes = plan.backward->workspace_bytes;
  }
  answer.layout_wishes = plan.layout_wishes;
  answer.steps = plan.steps;
  return answer;
}

// The last node that is no step of its result to the shape asked for.
const Node& claimed_node(const Trace& trace) {
  for (size_t i = trace.nodes.size(); i-- > 0;)
    if (trace.nodes[i].op->name == "sdpa") return trace.nodes[i];
  return trace.nodes.back();
}

}  // namespace

void bind_claims(nb::module_& m) {
  nb::class_<Answer>(m, "Answer", "What one executor answered to one call")
      .def_ro("executor", &Answer::executor)
      .def_ro("claimed", &Answer::claimed)
      .def_ro("code", &Answer::code)
      .def_ro("reason", &Answer::reason)
      .def_ro("deterministic", &Answer::deterministic)
      .def_ro("forward_kernel", &Answer::forward_kernel)
      .def_ro("backward_kernel", &Answer::backward_kernel)
      .def_ro("forward_workspace_bytes", &Answer::forward_workspace_bytes)
      .def_ro("backward_workspace_bytes", &Answer::backward_workspace_bytes)
      .def_ro("has_backward", &Answer::has_backward)
      .def_prop_ro("workspace_bytes", [](const Answer& a) { return std::max(a.forward_workspace_bytes, a.backward_workspace_bytes); })
      .def_ro("layout_wishes", &Answer::layout_wishes)
      .def_ro("steps", &Answer::steps)
      .def("__repr__", [](const Answer& a) {
        return "<" + a.executor + (a.claimed ? " claims: " + a.forward_kernel : " refuses: " + a.reason + " [" + a.code + "]") + ">";
      });

  // Answers for the last node of a trace, in list order.
  m.def(
      "claim_last",
      [](const Trace& trace, bool training, bool deterministic, nb::handle executors, nb::handle target) {
        if (trace.nodes.empty()) throw ShapeError("claims: the trace has no node");
        const ExecutorList list = executors_of(executors);
        const Target where = target_of(target);
        // Attention of other ranks and broadcasts is claimed in the form that compile gives it, on the layouts that arise.
        const bool other_form = trace.nodes.back().op->name == "sdpa" && !is_canonical_sdpa(trace, trace.nodes.back());
        const Trace asked = other_form ? alias_views(bring_attention_to_four_dims(trace)) : trace;
        Call call = call_of(asked, other_form ? claimed_node(asked) : asked.nodes.back(), training);
        call.deterministic = deterministic;
        ClaimOutcome outcome;
        {
          nb::gil_scoped_release unlocked;
          outcome = claim_call(call, list, where, true);
        }
        std::vector<Answer> answers;
        for (const ClaimAnswer& answer : outcome.answers) answers.push_back(answer_of(answer));
        return nb::make_tuple(outcome.winner ? nb::object(nb::str(std::string(outcome.winner->name()).c_str())) : nb::object(nb::none()),
                              answers);
      },
      nb::arg("trace"), nb::arg("training"), nb::arg("deterministic"), nb::arg("executors").none() = nb::none(),
      nb::arg("target").none() = nb::none());
}

}  // namespace fulmen::python
