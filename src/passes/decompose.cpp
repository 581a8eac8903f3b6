#include "passes/decompose.h"

#include "ops/builder.h"
#include "passes/substitution.h"

namespace fulmen {
namespace {

class Decomposer {
 public:
  Decomposer(Trace& out, const std::function<bool(const Trace&, const Node&)>& keep) : out_(out), keep_(keep) {}

  void visit(Node node) {
    substitution_.apply(node.inputs);
    const OpDef& op = op_of(node);
    const auto* decomposition = std::get_if<Decomposition>(&op.meaning);
    if (!decomposition || keep_(out_, node)) {
      out_.nodes.push_back(std::move(node));
      return;
    }
    const size_t begin = out_.nodes.size();
    Builder builder(out_);
    const std::vector<ValueId> results = decomposition->build(builder, node);
    FULMEN_CHECK(results.size() >= node.outputs.size());
    std::vector<Node> parts(std::make_move_iterator(out_.nodes.begin() + static_cast<std::ptrdiff_t>(begin)),
                            std::make_move_iterator(out_.nodes.end()));
    out_.nodes.resize(begin);
    for (Node& part : parts) visit(std::move(part));
    for (size_t i = 0; i < node.outputs.size(); ++i) substitution_.replace(node.outputs[i], results[i]);
  }

  const Substitution& substitution() const { return substitution_; }

 private:
  Trace& out_;
  const std::function<bool(const Trace&, const Node&)>& keep_;
  Substitution substitution_;
};

}  // namespace

Trace decompose(const Trace& trace, const std::function<bool(const Trace&, const Node&)>& keep) {
  Trace out = trace;
  out.nodes.clear();
  Decomposer decomposer(out, keep);
  for (const Node& node : trace.nodes) decomposer.visit(node);
  decomposer.substitution().apply(out.outputs);
  return out;
}

}  // namespace fulmen
