#include "executors/cpu/moving/moving.h"

#include <algorithm>
#include <string>

namespace fulmen::cpu {

bool is_moving_op(const Call& call) {
  static constexpr std::string_view ops[] = {"cat", "pad", "slice_scatter", "flip", "gather", "index_select", "index", "embedding",
                                             "embedding_grad", "index_put", "index_add", "scatter", "scatter_add", "cumsum", "cumprod",
                                             "sort", "topk", "arange", "uniform"};
  return std::find(std::begin(ops), std::end(ops), call.op->name) != std::end(ops);
}

std::unique_ptr<Kernel> make_moving_kernel(const Call& call) {
  if (auto kernel = make_copy_kernel(call)) return kernel;
  if (auto kernel = make_lookup_kernel(call)) return kernel;
  if (auto kernel = make_write_kernel(call)) return kernel;
  if (auto kernel = make_line_kernel(call)) return kernel;
  return make_source_kernel(call);
}

Claim claim_moving(const Call& call) {
  const auto kernel = make_moving_kernel(call);
  if (!kernel) {
    std::string types;
    for (const TensorType* type : call.inputs)
      if (type) types += (types.empty() ? "" : ", ") + to_string(*type);
    return Refusal{RefusalCode::wrong_dtype, call.op->name + ": cpu's kernel doesn't take these dtypes or layouts: " + types};
  }
  Plan plan;
  plan.forward.kernel = call.op->name;
  plan.forward.workspace_bytes = kernel->workspace_bytes();
  return plan;
}

}  // namespace fulmen::cpu
