// compile(): from a recorded trace to programs that run. The one place that sees all layers; the stages it walks are
// listed in passes/pipeline.cpp.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "executors/executor.h"
#include "runtime/program.h"

namespace fulmen {

struct CompileOptions {
  ExecutorList executors;
  Target target;
  bool training = false;       // make a backward for the inputs with requires_grad
  bool deterministic = false;
  std::vector<std::string> skip_passes;
  bool keep_texts = false;  // keep the text of the trace after each stage (explain)
  // Results and input gradients may be laid out as suits their producer (attention: as the operands), and the gradients
  // that come in as the results; else all are contiguous.
  bool free_layouts = false;
  // With free_layouts: strides of the gradients that come in, by trace output, where they aren't the result's. The forward
  // and what it saves are the same for all of them.
  std::vector<std::optional<Dims>> grad_layouts;
  bool share_outputs = false;  // the caller keeps results that the backward reads (CompiledTrace::saved_from_output)
};

struct Stage {
  std::string name;
  double ms = 0;
  std::string text;  // the trace after it, if asked for
};

// Who was asked for one node, in list order, and what each answered, until one claimed.
struct ClaimRecord {
  std::string node;      // its text
  std::string op;
  std::string executor;  // the winner; "view" if nothing runs; empty if it was decomposed
  std::string kernel;    // the plan's name for what runs
  std::string direction;  // "forward", "backward"
  std::vector<std::pair<std::string, Refusal>> refusals;
};

// A compiled trace. Without training only `forward` exists. With it, forward's outputs are the trace's, then the saved
// values; backward's inputs are the saved inputs (by index), the saved values, then one gradient for each trace output
// listed in grad_outputs; its outputs are the gradients of inputs_with_grad, in order.
struct CompiledTrace {
  Program forward;
  std::optional<Program> backward;
  int output_count = 0;                    // of the trace; forward.outputs() beyond are saved values
  std::vector<int> backward_saved_inputs;  // trace inputs that the backward reads, first in its inputs
  // With share_outputs: for each saved value of the backward the trace output that it is, -1 where forward writes it.
  std::vector<int> saved_from_output;
  std::vector<int> grad_outputs;           // trace outputs whose gradients the backward takes, last in its inputs
  std::vector<int> inputs_with_grad;       // trace inputs that backward's outputs belong to
  std::vector<Stage> stages;
  std::vector<ClaimRecord> claims;
  size_t saved_bytes = 0;

  const TensorType& input_type(int i) const { return forward.inputs()[static_cast<size_t>(i)]; }
};

// Throws UnsupportedError with all refusals if a node is claimed by nobody.
std::shared_ptr<const CompiledTrace> compile(const Trace& trace, const CompileOptions& options);

}  // namespace fulmen
