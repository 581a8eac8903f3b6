#include "ops/families.h"

namespace fulmen {

std::vector<OpDef> norm_ops() { return {}; }

}  // namespace fulmen
