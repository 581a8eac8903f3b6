// Counters that an executor keeps beside its claims: caches, plans, files. An executor that has some derives from this
// too; fulmen.cache_info() shows them under the executor's name.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace fulmen {

class Counting {
 public:
  virtual ~Counting() = default;
  // Name and value, in the order in which they are shown.
  virtual std::vector<std::pair<std::string, int64_t>> counters() const = 0;
};

}  // namespace fulmen
