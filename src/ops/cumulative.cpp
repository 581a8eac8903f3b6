#include "ops/families.h"

namespace fulmen {

std::vector<OpDef> cumulative_ops() { return {}; }

}  // namespace fulmen
