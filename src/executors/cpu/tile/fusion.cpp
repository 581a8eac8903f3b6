#include "executors/cpu/tile/fusion.h"

#include <algorithm>
#include <string>

#include "executors/cpu/tile/program.h"
#include "ops/pointwise_entry.h"

namespace fulmen::cpu {
namespace {

class TileKernel final : public Kernel {
 public:
  explicit TileKernel(std::shared_ptr<const tile::Program> program) : program_(std::move(program)) {}
  size_t workspace_bytes() const override { return static_cast<size_t>(program_->workspace_bytes); }
  void run(const RunContext& context, const void* const* inputs, void* const* outputs) const override {
    tile::run(*program_, inputs, outputs, context.workspace);
  }

 private:
  std::shared_ptr<const tile::Program> program_;
};

// A loop nest that never runs would leave the result of a reduction unwritten.
bool is_empty(const TensorType* type) { return type && type->element_count() == 0; }

Trace single_node_body(const Call& call) {
  Trace body;
  body.name = call.op->name;
  Node node;
  node.op = call.op;
  node.attrs = *call.attrs;
  for (const TensorType* type : call.inputs) {
    const ValueId id = type ? body.add_input(*type) : no_value;
    if (!type) body.inputs.push_back(no_value);  // inputs keep their places
    node.inputs.push_back(id);
  }
  for (const TensorType* type : call.outputs) {
    const ValueId id = type ? body.add_value(*type) : no_value;
    node.outputs.push_back(id);
    body.outputs.push_back(id);
  }
  body.nodes.push_back(std::move(node));
  return body;
}

}  // namespace

Claim claim_tile_program(const Call& call) {
  for (size_t i = 0; i < call.inputs.size(); ++i)
    if (is_empty(call.inputs[i]))
      return Refusal{RefusalCode::degenerate, call.op->name + ": operand " + std::to_string(i) + " is " + to_string(*call.inputs[i]) +
                                                  ", a tile program needs at least one element of each"};
  auto compiled = call.body ? tile::compile_body(*call.body, chosen_isa()) : tile::compile_body(single_node_body(call), chosen_isa());
  if (const auto* reason = std::get_if<std::string>(&compiled)) {
    const bool names_op = reason->rfind(call.op->name + ": ", 0) == 0;
    return Refusal{RefusalCode::not_implemented, names_op ? *reason : call.op->name + ": " + *reason};
  }
  auto program = std::make_shared<const tile::Program>(std::get<tile::Program>(std::move(compiled)));
  Plan plan;
  plan.forward.kernel = call.body ? "tile_fusion" : "tile_" + call.op->name;
  plan.forward.workspace_bytes = static_cast<size_t>(program->workspace_bytes);
  plan.data = std::move(program);
  return plan;
}

std::unique_ptr<Kernel> make_tile_kernel(const Plan& plan) {
  return std::make_unique<TileKernel>(std::static_pointer_cast<const tile::Program>(plan.data));
}

bool is_tile_op(const Call& call) {
  static constexpr std::string_view structural[] = {"convert", "sum", "amax", "amin", "contiguous", "reshape", "permute", "broadcast_to", "full", "dropout_mask"};
  if (call.outputs.size() != 1 || !call.outputs[0] || call.outputs[0]->element_count() == 0) return false;
  for (const TensorType* type : call.inputs)
    if (is_empty(type)) return false;
  const std::string& op = call.op->name;
  return std::find(std::begin(structural), std::end(structural), op) != std::end(structural) ||
         tile::find_pointwise(pointwise_body_name(op, *call.attrs)) != nullptr;
}

}  // namespace fulmen::cpu
