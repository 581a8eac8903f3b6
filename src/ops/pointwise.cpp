#include "ops/families.h"

namespace fulmen {

std::vector<OpDef> pointwise_ops() { return {}; }

}  // namespace fulmen
