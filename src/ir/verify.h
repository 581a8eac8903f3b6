// The invariants of a trace; runs after every pass. A violation is an InternalError that shows the node.
//  - names are unique; ids are in range; every value is an input or the result of exactly one node
//  - operands are defined before they are used; outputs are defined
//  - a fusion has a body whose inputs and outputs match the node's types; no other node has one
#pragma once

#include <string_view>

#include "ir/trace.h"

namespace fulmen {

// `after` names the pass in messages.
void verify(const Trace& trace, std::string_view after = "building");

}  // namespace fulmen
