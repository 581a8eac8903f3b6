#include "ops/families.h"

namespace fulmen {

std::vector<OpDef> conv_ops() { return {}; }

}  // namespace fulmen
