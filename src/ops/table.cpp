#include "ops/table.h"

#include <memory>
#include <unordered_map>

#include "ops/families.h"

namespace fulmen {
namespace {

struct Table {
  std::vector<std::unique_ptr<const OpDef>> owned;
  std::vector<const OpDef*> ordered;
  std::unordered_map<std::string_view, const OpDef*> by_name;

  Table() {
    for (auto* family : {creation_ops, pointwise_ops, comparison_ops, random_ops, movement_ops, indexing_ops, reduction_ops,
                         cumulative_ops, matmul_ops, softmax_ops, norm_ops, loss_ops, embedding_ops, conv_ops, attention_ops,
                         structural_ops}) {
      for (OpDef& def : family()) {
        owned.push_back(std::make_unique<const OpDef>(std::move(def)));
        const OpDef* op = owned.back().get();
        ordered.push_back(op);
        FULMEN_CHECK(by_name.emplace(op->name, op).second);
      }
    }
  }
};

const Table& table() {
  static const Table instance;
  return instance;
}

}  // namespace

const std::vector<const OpDef*>& all_ops() { return table().ordered; }

const OpDef* find_op(std::string_view name) {
  const auto& by_name = table().by_name;
  const auto at = by_name.find(name);
  return at == by_name.end() ? nullptr : at->second;
}

const OpDef& require_op(std::string_view name) {
  if (const OpDef* op = find_op(name)) return *op;
  throw UnsupportedError("op '" + std::string(name) + "' is not in the catalogue");
}

}  // namespace fulmen
