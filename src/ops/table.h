// The op catalogue: all entries, in the order of their families.
#pragma once

#include <span>
#include <string_view>

#include "ops/op_def.h"

namespace fulmen {

const std::vector<const OpDef*>& all_ops();
const OpDef* find_op(std::string_view name);    // null if there is none
const OpDef& require_op(std::string_view name);  // UnsupportedError if there is none

}  // namespace fulmen
