#include "executors/cudnn/proof.h"

#include "core/error.h"
#include "executors/cudnn/known_faults.h"
#include "executors/cudnn/library.h"

namespace fulmen::cudnn {

namespace {

std::string dims_text(const TensorForm& form) { return to_string(Dims(form.dims.begin(), form.dims.end())); }

std::string call_text(const Problem& p) {
  std::string text = std::string(dtype_name(p.query.dtype)) + " query " + dims_text(p.query) + ", key " +
                     dims_text(p.key) + ", head_dim " + std::to_string(p.query.dims[3]);
  if (p.value.dims[3] != p.query.dims[3]) text += "/" + std::to_string(p.value.dims[3]);
  if (p.causal) text += p.lower_right ? ", causal (lower right)" : ", causal";
  if (p.window_left >= 0 || p.window_right >= 0) text += ", window";
  if (p.bias) text += ", mask " + dims_text(*p.bias);
  if (p.bias_gradient) text += " with its gradient";
  if (p.dropout_p > 0) text += ", dropout";
  if (p.key_lengths) text += ", key_lengths";
  if (p.deterministic) text += ", deterministic";
  return text;
}

struct Answers {
  Answer forward, backward;
  std::unique_ptr<Graph> forward_graph, backward_graph;
  std::optional<Refusal> refusal;
};

Answers ask(const Problem& problem, const Side& side, const ProofOptions& options, int& asked) {
  Answers answers;
  const std::string library = "cudnn " + version_text(options.version);
  const auto one = [&](Direction direction, RefusalCode code) {
    ++asked;
    auto graph = std::make_unique<Graph>(problem, direction, side);
    Answer answer = graph->prove();
    const bool forward = direction == Direction::forward;
    if (side.handle) (forward ? answers.forward_graph : answers.backward_graph) = std::move(graph);
    const char* name = forward ? "forward" : "backward";
    switch (answer.verdict) {
      case Verdict::accepted: break;
      case Verdict::refused:
        answers.refusal = Refusal{code, "sdpa: " + library + " refuses the " + name + " on " + options.target_name +
                                            " for " + call_text(problem) + " (" + answer.message + ")"};
        break;
      case Verdict::prerequisite_missing:
        answers.refusal = Refusal{RefusalCode::prerequisite_missing,
                                  "sdpa: " + library + " misses something it loads (" + answer.message + ")"};
        break;
      case Verdict::failed:
        throw DeviceError(library + ": the question for the " + std::string(name) + " on " + options.target_name +
                          " for " + call_text(problem) + " failed: " + answer.message);
    }
    if (!answers.refusal && options.workspace_limit_bytes > 0 &&
        answer.workspace_bytes > static_cast<size_t>(options.workspace_limit_bytes))
      answers.refusal = Refusal{RefusalCode::too_large, "sdpa: " + library + "'s " + name + " wants " +
                                                            std::to_string(answer.workspace_bytes) +
                                                            " bytes of workspace, the limit is " +
                                                            std::to_string(options.workspace_limit_bytes)};
    return answer;
  };
  answers.forward = one(Direction::forward, RefusalCode::forward_unsupported);
  if (problem.training && !options.forward_only && !answers.refusal)
    answers.backward = one(Direction::backward,
                           problem.deterministic ? RefusalCode::not_deterministic : RefusalCode::backward_unsupported);
  return answers;
}

}  // namespace

std::variant<Proof, Refusal> prove(Problem problem, const Side& side, const ProofOptions& options, int& asked) {
  const KnownFault* fault = find_fault(problem, options.version, side.compute_capability, options.ignored_faults);
  const auto fault_text = [&] { return std::string(fault->what) + ", " + std::string(fault->link); };
  if (fault && fault->cure == Cure::refuse) {
    // A call that the library refuses anyway is told so: the fault is then beside the point.
    Answers plain = ask(problem, side, options, asked);
    if (plain.refusal) return *plain.refusal;
    return Refusal{RefusalCode::known_fault,
                   "sdpa: cudnn " + version_text(options.version) + " has a known fault here: " + fault_text()};
  }
  Problem asked_for = cured(problem, options.version, side.compute_capability, options.ignored_faults);
  Answers answers = ask(asked_for, side, options, asked);
  if (answers.refusal && asked_for.bias && asked_for.bias->strides[2] == 0) {
    // The row written out is the form that every version takes; it costs memory.
    Problem written = asked_for;
    expand_mask_rows(written);
    written.steps.push_back("mask's row written out for every query, since cudnn refuses the repeated one: bias " +
                            dims_text(*written.bias));
    if (Answers second = ask(written, side, options, asked); !second.refusal) {
      answers = std::move(second);
      asked_for = std::move(written);
    }
  }
  if (answers.refusal && fault) {
    Answers plain = ask(problem, side, options, asked);
    if (plain.refusal) return *plain.refusal;
    return Refusal{RefusalCode::known_fault, "sdpa: cudnn " + version_text(options.version) +
                                                 " has a known fault here: " + fault_text() +
                                                 "; the way around it is refused: " + answers.refusal->reason};
  }
  if (answers.refusal && problem.deterministic && answers.refusal->code == RefusalCode::not_deterministic) {
    // Is it the flag, or is there no backward at all?
    Problem loose = asked_for;
    loose.deterministic = false;
    if (Answers without = ask(loose, side, options, asked); without.refusal) return *without.refusal;
  }
  if (answers.refusal) return *answers.refusal;
  return Proof{std::move(asked_for), std::move(answers.forward), std::move(answers.backward),
               std::move(answers.forward_graph), std::move(answers.backward_graph)};
}

}  // namespace fulmen::cudnn
