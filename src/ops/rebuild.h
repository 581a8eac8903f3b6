// A trace whose text came from outside, made again call by call: every node is checked against the catalogue as if a user
// had just written it, and what it declares against what the op gives. Without this a wrong size in a file would be a
// read past the end of memory. Executors, layouts of results and fusions are dropped: they are the compiler's to decide;
// so are outputs that are none.
#pragma once

#include "ir/trace.h"

namespace fulmen {

// ShapeError or TypeError that names the node where it doesn't hold.
Trace rebuild(const Trace& parsed);

}  // namespace fulmen
