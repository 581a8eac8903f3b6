// Ops that carry structure instead of meaning of their own: `fusion` runs the nodes of its body as one kernel.
#include "ops/families.h"

namespace fulmen {

std::vector<OpDef> structural_ops() {
  std::vector<OpDef> ops;
  ops.push_back({
      {.name = "fusion"},
      /*doc=*/"The nodes of its body, run as one kernel. Made by the fuse pass after differentiation, never by users.",
      /*operands=*/{{"inputs", Need::variadic}},
      /*attributes=*/{},
      /*shape=*/[](const CallTypes& call) -> std::vector<TensorType> {
        throw InternalError("internal: " + call.op.name + " takes its result types from its body; it is made by the fuse pass");
      },
      /*meaning=*/Primitive{[](const ReferenceArgs&) {
        throw InternalError("internal: fusion is run node by node by its executor, not through its entry");
      }},
      /*gradient=*/NotDifferentiable{"it is made after differentiation"},
      /*autocast=*/Autocast::keep,
      /*samples=*/{},
      /*torch=*/{},
  });
  return ops;
}

}  // namespace fulmen
