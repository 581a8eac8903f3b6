// Reads a trace from the text that print.h writes; print(parse(print(t))) is print(t). Faults in the text are
// ShapeError/TypeError that name the line and what was needed; no text can crash it.
#pragma once

#include <functional>
#include <string_view>

#include "ir/trace.h"

namespace fulmen {

// Looks an op up by name; null if there is none.
using OpLookup = std::function<const OpInfo*(std::string_view)>;

Trace parse_trace(std::string_view text, const OpLookup& lookup);

}  // namespace fulmen
