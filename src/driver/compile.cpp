#include "driver/compile.h"

#include <algorithm>

#include "driver/build_program.h"
#include "ir/verify.h"
#include "passes/alias_views.h"
#include "passes/pipeline.h"

namespace fulmen {
namespace {

void check_skipped(const std::vector<std::string>& skip) {
  const auto& known = optional_passes();
  for (const std::string& name : skip) {
    if (std::find(known.begin(), known.end(), name) != known.end()) continue;
    std::string list;
    for (const std::string& each : known) list += (list.empty() ? "" : ", ") + each;
    throw UnsupportedError("compile: skip_passes names '" + name + "'; passes that can be skipped: " + list);
  }
}

std::vector<ClaimRecord> claim_records(const std::vector<NodeClaim>& claims) {
  std::vector<ClaimRecord> records;
  for (const NodeClaim& claim : claims) {
    ClaimRecord record{claim.node, claim.op, "", "", claim.direction, {}};
    for (const ClaimAnswer& answer : claim.answers) {
      if (const auto* plan = std::get_if<Plan>(&answer.claim)) {
        record.executor = answer.executor;
        record.kernel = plan->forward.kernel;
      } else {
        record.refusals.emplace_back(answer.executor, std::get<Refusal>(answer.claim));
      }
    }
    records.push_back(std::move(record));
  }
  return records;
}

}  // namespace

std::shared_ptr<const CompiledTrace> compile(const Trace& trace, const CompileOptions& options) {
  verify(trace, "acquire");
  check_skipped(options.skip_passes);
  PassRunner runner(options.skip_passes, options.keep_texts);
  PipelineResult lowered =
      run_pipeline(trace, {options.executors, options.target, options.training, options.deterministic, options.free_layouts, options.share_outputs, &options.grad_layouts}, runner);
  auto compiled = std::make_shared<CompiledTrace>();
  compiled->forward = build_program(lowered.forward, options.executors, options.target);
  if (lowered.backward) compiled->backward = build_program(*lowered.backward, options.executors, options.target);
  compiled->output_count = lowered.output_count;
  compiled->backward_saved_inputs = std::move(lowered.saved_inputs);
  compiled->saved_from_output = std::move(lowered.saved_from_output);
  compiled->grad_outputs = std::move(lowered.grad_outputs);
  compiled->inputs_with_grad = std::move(lowered.inputs_with_grad);
  compiled->saved_bytes = lowered.saved_bytes;
  runner.note("program: forward", lowered.forward);
  if (lowered.backward) runner.note("program: backward", *lowered.backward);
  for (auto& record : runner.take_records()) compiled->stages.push_back({record.name, record.ms, std::move(record.text)});
  compiled->claims = claim_records(lowered.claims);
  return compiled;
}

}  // namespace fulmen
