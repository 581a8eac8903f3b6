// Replacing values while a pass rebuilds the node list.
#pragma once

#include <vector>

#include "ir/trace.h"

namespace fulmen {

class Substitution {
 public:
  void replace(ValueId from, ValueId to) {
    if (from == no_value || from == to) return;
    if (static_cast<size_t>(from) >= map_.size()) map_.resize(static_cast<size_t>(from) + 1, no_value);
    map_[static_cast<size_t>(from)] = (*this)(to);
  }
  ValueId operator()(ValueId id) const {
    while (id != no_value && static_cast<size_t>(id) < map_.size() && map_[static_cast<size_t>(id)] != no_value)
      id = map_[static_cast<size_t>(id)];
    return id;
  }
  void apply(std::vector<ValueId>& ids) const {
    for (ValueId& id : ids) id = (*this)(id);
  }

 private:
  std::vector<ValueId> map_;
};

}  // namespace fulmen
