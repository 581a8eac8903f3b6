#include "ops/families.h"

namespace fulmen {

std::vector<OpDef> random_ops() { return {}; }

}  // namespace fulmen
