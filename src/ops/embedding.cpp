#include "ops/families.h"

namespace fulmen {

std::vector<OpDef> embedding_ops() { return {}; }

}  // namespace fulmen
