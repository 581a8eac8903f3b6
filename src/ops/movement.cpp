#include "ops/families.h"

namespace fulmen {

std::vector<OpDef> movement_ops() { return {}; }

}  // namespace fulmen
