// The ordered list of passes: the only place that knows the order. pipeline.cpp has the reason for each position.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "passes/claim_nodes.h"
#include "passes/split.h"

namespace fulmen {

// Runs passes, times them, verifies the trace after each and can leave out any that is optional.
class PassRunner {
 public:
  struct Record {
    std::string name;
    double ms = 0;
    std::string text;
  };

  PassRunner(std::vector<std::string> skip, bool keep_texts) : skip_(std::move(skip)), keep_texts_(keep_texts) {}

  // Optional passes are left out if their name is in the skip list. Naming one that isn't optional is an error.
  Trace run(std::string_view name, const Trace& trace, const std::function<Trace(const Trace&)>& pass, bool optional = true);
  void note(std::string_view name, const Trace& trace, double ms = 0);

  // From here on records are named "pass (scope)"; a pass that runs again in its scope "pass (scope, 2)". So every record
  // has a name of its own.
  void enter(std::string_view scope) { scope_ = scope; }

  std::vector<Record> take_records() { return std::move(records_); }

 private:
  std::vector<std::string> skip_;
  bool keep_texts_;
  std::string scope_;
  std::vector<Record> records_;
};

struct PipelineOptions {
  const ExecutorList& executors;
  const Target& target;
  bool training = false;
  bool deterministic = false;
  bool free_layouts = false;   // of CompileOptions
  bool share_outputs = false;  // of CompileOptions
  const std::vector<std::optional<Dims>>* grad_layouts = nullptr;  // of CompileOptions
};

// Names that may be skipped, for messages and docs.
const std::vector<std::string>& optional_passes();

struct PipelineResult {
  Trace forward;
  std::optional<Trace> backward;
  int output_count = 0;
  std::vector<int> saved_inputs, grad_outputs, inputs_with_grad;
  std::vector<int> saved_from_output;  // of CompiledTrace
  size_t saved_bytes = 0;
  std::vector<NodeClaim> claims;
};

PipelineResult run_pipeline(const Trace& trace, const PipelineOptions& options, PassRunner& runner);

}  // namespace fulmen
