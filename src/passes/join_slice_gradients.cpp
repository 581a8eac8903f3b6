#include "passes/join_slice_gradients.h"

#include <algorithm>
#include <optional>

#include "ops/builder.h"
#include "passes/substitution.h"

namespace fulmen {
namespace {

// A pad by zeros along one dim: which part of the result its operand fills.
struct Piece {
  ValueId value;
  size_t dim;
  int64_t begin, end;
};

class Joiner {
 public:
  explicit Joiner(const Trace& trace) : trace_(trace), producer_(producers(trace)), uses_(use_counts(trace)) {}

  // The pieces of a sum of pads, in order, if they lie side by side along one dim and fill it.
  std::optional<std::vector<Piece>> pieces_of(const Node& sum) const {
    std::vector<Piece> pieces;
    if (!collect(sum, pieces) || pieces.size() < 2) return std::nullopt;
    std::sort(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) { return a.begin < b.begin; });
    int64_t end = 0;
    for (const Piece& piece : pieces) {
      if (piece.dim != pieces[0].dim || piece.begin != end) return std::nullopt;
      end = piece.end;
    }
    if (end != trace_.type(sum.outputs[0]).shape[pieces[0].dim]) return std::nullopt;
    return pieces;
  }

  // An add that only another add of the same sum reads isn't a sum of its own.
  bool is_inner(const Node& node) const { return node.op->name == "add" && uses_[static_cast<size_t>(node.outputs[0])] == 1 && read_by_add_[static_cast<size_t>(node.outputs[0])]; }

  void note_readers() {
    read_by_add_.assign(trace_.values.size(), false);
    for (const Node& node : trace_.nodes)
      if (node.op->name == "add")
        for (ValueId id : node.inputs)
          if (id != no_value) read_by_add_[static_cast<size_t>(id)] = true;
  }

 private:
  bool collect(const Node& node, std::vector<Piece>& pieces) const {
    for (ValueId id : node.inputs) {
      if (id == no_value || trace_.type(id).shape != trace_.type(node.outputs[0]).shape ||
          trace_.type(id).dtype != trace_.type(node.outputs[0]).dtype || uses_[static_cast<size_t>(id)] != 1)
        return false;
      const int from = producer_[static_cast<size_t>(id)];
      if (from < 0) return false;
      const Node& part = trace_.nodes[static_cast<size_t>(from)];
      if (part.op->name == "add") {
        if (!collect(part, pieces)) return false;
        continue;
      }
      const auto piece = piece_of(part);
      if (!piece) return false;
      pieces.push_back(*piece);
    }
    return true;
  }

  std::optional<Piece> piece_of(const Node& node) const {
    if (node.op->name != "pad" || node.attrs.get_float("value") != 0.0) return std::nullopt;
    const Dims& pads = node.attrs.get_dims("pads");
    const Dims& shape = trace_.type(node.outputs[0]).shape;
    std::optional<Piece> piece;
    for (size_t d = 0; 2 * d + 1 < pads.size(); ++d) {
      if (pads[2 * d] == 0 && pads[2 * d + 1] == 0) continue;
      if (piece || pads[2 * d] < 0 || pads[2 * d + 1] < 0) return std::nullopt;
      piece = Piece{node.inputs[0], d, pads[2 * d], shape[d] - pads[2 * d + 1]};
    }
    return piece;
  }

  const Trace& trace_;
  std::vector<int> producer_, uses_;
  std::vector<bool> read_by_add_;
};

}  // namespace

Trace join_slice_gradients(const Trace& trace) {
  Joiner joiner(trace);
  joiner.note_readers();
  Trace out = trace;
  out.nodes.clear();
  Builder builder(out);
  Substitution substitution;
  for (Node node : trace.nodes) {
    if (node.op->name == "add" && !joiner.is_inner(node)) {
      if (const auto pieces = joiner.pieces_of(node)) {
        std::vector<ValueId> values;
        for (const Piece& piece : *pieces) values.push_back(substitution(piece.value));
        const ValueId joined = builder.emit1("cat", values, {{"dim", static_cast<int64_t>(pieces->front().dim)}});
        substitution.replace(node.outputs[0], joined);
        continue;
      }
    }
    substitution.apply(node.inputs);
    out.nodes.push_back(std::move(node));
  }
  substitution.apply(out.outputs);
  return out;  // the pads and inner adds are dead now
}

}  // namespace fulmen
