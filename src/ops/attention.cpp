#include "ops/families.h"

namespace fulmen {

std::vector<OpDef> attention_ops() { return {}; }

}  // namespace fulmen
