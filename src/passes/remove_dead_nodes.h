// Drops nodes whose results nobody reads, so that later passes don't spend time on them.
//
//   t1 = exp(x)                     t2 = tanh(x)
//   t2 = tanh(x)              ->    return t2
//   return t2
#pragma once

#include "ir/trace.h"

namespace fulmen {

Trace remove_dead_nodes(const Trace& trace);

}  // namespace fulmen
