#include "passes/bring_attention_to_four_dims.h"

#include "ops/sdpa_call.h"
#include "passes/decompose.h"

namespace fulmen {

Trace bring_attention_to_four_dims(const Trace& trace) {
  return decompose(trace, [](const Trace& now, const Node& node) { return node.op->name != "sdpa" || is_canonical_sdpa(now, node); });
}

}  // namespace fulmen
