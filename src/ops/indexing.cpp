#include "ops/families.h"

namespace fulmen {

std::vector<OpDef> indexing_ops() { return {}; }

}  // namespace fulmen
