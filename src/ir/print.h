// The text of a trace, for people and for parse.h:
//
//   trace program(x: f32[2,3]!, w: f32[4,3]!) {
//     t2: f32[2,4]! = linear(x, w, none) @cpu
//     t3: f32[2,4]! = gelu(t2, approximate="none")
//     return t3
//   }
//
// A node with several results has "(a: type, b: type) = ..."; an absent operand or result is "none", an unwanted result
// "_". A fusion is followed by its body in braces. "# ..." to the end of a line is a comment.
#pragma once

#include <string>

#include "ir/trace.h"

namespace fulmen {

std::string to_string(const Trace& trace);
std::string to_string(const Trace& trace, const Node& node);

}  // namespace fulmen
