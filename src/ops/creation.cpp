#include "ops/families.h"

namespace fulmen {

std::vector<OpDef> creation_ops() { return {}; }

}  // namespace fulmen
