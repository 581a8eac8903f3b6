#include "executors/cpu/gemm/matmul_kernels.h"

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/error.h"
#include "executors/cpu/dispatch.h"

namespace fulmen::cpu {
namespace {

class GemmKernel final : public Kernel {
 public:
  explicit GemmKernel(const MatmulProblem& problem)
      : plan_(problem.problem), a_(problem.a), b_(problem.b), bias_(problem.bias), residual_(problem.residual) {}

  size_t workspace_bytes() const override { return plan_.workspace_bytes(); }

  void run(const RunContext& context, const void* const* inputs, void* const* outputs) const override {
    plan_.run(inputs[a_], inputs[b_], outputs[0], bias_ < 0 ? nullptr : inputs[bias_],
              residual_ < 0 ? nullptr : inputs[residual_], context.workspace);
  }

 private:
  GemmPlan plan_;
  int a_, b_, bias_, residual_;
};

// A view of one operand: batch dims outermost, then rows and columns.
struct View {
  DType dtype = DType::f32;
  Dims shape{}, strides{};  // of the batch dims
  int64_t rows = 1, columns = 1, row_stride = 0, column_stride = 0;
};

View matrix_view(const TensorType& type) {
  View v{.dtype = type.dtype};
  const size_t rank = type.shape.size();
  v.rows = type.shape[rank - 2], v.row_stride = type.strides[rank - 2];
  v.columns = type.shape[rank - 1], v.column_stride = type.strides[rank - 1];
  v.shape.assign(type.shape.begin(), type.shape.end() - 2);
  v.strides.assign(type.strides.begin(), type.strides.end() - 2);
  return v;
}
View row_view(const TensorType& type) {
  if (type.rank() >= 2) return matrix_view(type);
  return {.dtype = type.dtype, .rows = 1, .columns = type.shape[0], .row_stride = 0, .column_stride = type.strides[0]};
}
View column_view(const TensorType& type) {
  if (type.rank() >= 2) return matrix_view(type);
  return {.dtype = type.dtype, .rows = type.shape[0], .columns = 1, .row_stride = type.strides[0], .column_stride = 0};
}
View transposed(View v) {
  std::swap(v.rows, v.columns);
  std::swap(v.row_stride, v.column_stride);
  return v;
}

// The result, whose rows (columns) dim is missing where the left (right) operand has one dim.
View result_view(const TensorType& type, bool has_rows, bool has_columns) {
  View v{.dtype = type.dtype};
  size_t batch = type.shape.size();
  if (has_columns) {
    --batch;
    v.columns = type.shape[batch], v.column_stride = type.strides[batch];
  }
  if (has_rows) {
    --batch;
    v.rows = type.shape[batch], v.row_stride = type.strides[batch];
  }
  v.shape.assign(type.shape.begin(), type.shape.begin() + static_cast<ptrdiff_t>(batch));
  v.strides.assign(type.strides.begin(), type.strides.begin() + static_cast<ptrdiff_t>(batch));
  return v;
}

// Strides of `view` along the result's batch dims: 0 where it is repeated.
Dims broadcast_strides(const View& view, const Dims& batch) {
  Dims strides(batch.size(), 0);
  const size_t lead = batch.size() - view.shape.size();
  for (size_t i = 0; i < view.shape.size(); ++i) strides[lead + i] = view.shape[i] == 1 ? 0 : view.strides[i];
  return strides;
}

std::string operand_word(const Call& call, size_t i) {
  return i < call.op->operands.size() ? call.op->operands[i].name : "operand " + std::to_string(i);
}

std::optional<Refusal> refuse_types(const Call& call) {
  const std::string op = call.op->name + ": ";
  for (size_t i = 0; i < call.inputs.size(); ++i) {
    const TensorType* type = call.inputs[i];
    if (!type) continue;
    if (type->device.kind != DeviceKind::cpu)
      return Refusal{RefusalCode::wrong_device, op + operand_word(call, i) + " is on " + to_string(type->device) + ", cpu needs host memory"};
    if (!gemm_takes(type->dtype))
      return Refusal{RefusalCode::wrong_dtype, op + operand_word(call, i) + " is " + std::string(dtype_name(type->dtype)) + ", the cpu product takes f32, bf16 and f16"};
  }
  return std::nullopt;
}

// Fits the batch into max_batch_dims, joining dims that every operand steps through evenly.
bool set_batch(GemmProblem& problem, const Dims& sizes, std::array<Dims, 4> strides) {
  std::array<BatchStrides*, 4> to{&problem.a.batch_strides, &problem.b.batch_strides, &problem.c.batch_strides,
                                  &problem.epilogue.residual_batch_strides};
  Dims kept_sizes;
  std::array<Dims, 4> kept;
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] == 1) continue;
    bool joins = !kept_sizes.empty();
    for (size_t i = 0; joins && i < 4; ++i) joins = kept[i].back() == strides[i][d] * sizes[d];
    if (joins) {
      kept_sizes.back() *= sizes[d];
      for (size_t i = 0; i < 4; ++i) kept[i].back() = strides[i][d];
    } else {
      kept_sizes.push_back(sizes[d]);
      for (size_t i = 0; i < 4; ++i) kept[i].push_back(strides[i][d]);
    }
  }
  if (kept_sizes.size() > max_batch_dims) return false;
  problem.batch_dims = static_cast<int>(kept_sizes.size());
  for (size_t d = 0; d < kept_sizes.size(); ++d) {
    problem.batch_sizes[d] = kept_sizes[d];
    for (size_t i = 0; i < 4; ++i) (*to[i])[d] = kept[i][d];
  }
  return true;
}

// input of addmm and baddbmm, broadcast to the result: a bias if all rows share it unscaled, else a residual.
void add_input(MatmulProblem& m, const TensorType& input, const View& c, Dims& batch_strides, double beta) {
  Epilogue& e = m.problem.epilogue;
  const size_t rank = input.shape.size();
  const auto stride = [&](size_t from_end) {
    return rank < from_end || input.shape[rank - from_end] == 1 ? 0 : input.strides[rank - from_end];
  };
  batch_strides.assign(c.shape.size(), 0);
  bool repeated = stride(2) == 0;
  for (size_t i = 0; i < c.shape.size(); ++i) {
    batch_strides[c.shape.size() - 1 - i] = stride(3 + i);
    repeated = repeated && stride(3 + i) == 0;
  }
  if (repeated && beta == 1.0) {
    e.has_bias = true, e.bias_dtype = input.dtype, e.bias_stride = stride(1);
    m.bias = 0;
  } else {
    e.has_residual = true, e.residual_dtype = input.dtype;
    e.residual_row_stride = stride(2), e.residual_column_stride = stride(1);
    e.residual_scale = static_cast<float>(beta);
    m.residual = 0;
  }
}

}  // namespace

std::variant<MatmulProblem, Refusal> matmul_problem(const Call& call) {
  const std::string& op = call.op->name;
  const bool plain = op == "matmul" || op == "bmm" || op == "dot", linear = op == "linear";
  const bool scaled_sum = op == "addmm" || op == "baddbmm";
  if (!plain && !linear && !scaled_sum)
    return Refusal{RefusalCode::not_implemented, op + ": not a matrix product of the cpu executor"};
  if (auto refusal = refuse_types(call)) return *refusal;

  MatmulProblem m;
  m.a = scaled_sum ? 1 : 0;
  m.b = m.a + 1;
  const TensorType &type_a = *call.inputs[static_cast<size_t>(m.a)], &type_b = *call.inputs[static_cast<size_t>(m.b)];
  const View a = row_view(type_a);
  const View b = linear && type_b.rank() == 2 ? transposed(matrix_view(type_b)) : column_view(type_b);
  const View c = result_view(*call.outputs[0], type_a.rank() > 1, type_b.rank() > 1);

  GemmProblem& p = m.problem;
  p.m = a.rows, p.n = b.columns, p.k = a.columns;
  p.a = {a.dtype, a.row_stride, a.column_stride, {}};
  p.b = {b.dtype, b.row_stride, b.column_stride, {}};
  p.c = {c.dtype, c.row_stride, c.column_stride, {}};
  p.compute = a.dtype == b.dtype ? a.dtype : DType::f32;

  Dims residual_strides(c.shape.size(), 0);
  if (linear && call.inputs.size() > 2 && call.inputs[2]) {
    const TensorType& bias = *call.inputs[2];
    p.epilogue.has_bias = true;
    p.epilogue.bias_dtype = bias.dtype;
    p.epilogue.bias_stride = bias.element_count() == 1 ? 0 : bias.strides.back();
    m.bias = 2;
  }
  if (scaled_sum) {
    const double beta = call.attrs->get_float("beta");
    p.epilogue.alpha = static_cast<float>(call.attrs->get_float("alpha"));
    if (beta != 0.0) add_input(m, *call.inputs[0], c, residual_strides, beta);
  }
  if (!set_batch(p, c.shape, {broadcast_strides(a, c.shape), broadcast_strides(b, c.shape), c.strides, residual_strides}))
    return Refusal{RefusalCode::wrong_layout, op + ": the batch has more than " + std::to_string(max_batch_dims) +
                                                  " dims that don't lie evenly in memory, the cpu product takes " + std::to_string(max_batch_dims)};
  return m;
}

Claim claim_matmul(const Call& call) {
  auto problem = matmul_problem(call);
  if (const auto* refusal = std::get_if<Refusal>(&problem)) return *refusal;
  const auto& m = std::get<MatmulProblem>(problem);
  Plan plan;
  plan.forward.kernel = "cpu::gemm_" + std::string(dtype_name(m.problem.compute)) + "<" + std::string(isa_name(chosen_isa())) + ">";
  plan.forward.workspace_bytes = GemmPlan(m.problem).workspace_bytes();
  return plan;
}

std::unique_ptr<Kernel> make_gemm_kernel(const MatmulProblem& problem) { return std::make_unique<GemmKernel>(problem); }

std::unique_ptr<Kernel> make_gemm_kernel(const GemmProblem& problem) {
  MatmulProblem m{problem, 0, 1, -1, -1};
  int next = 2;
  if (problem.epilogue.has_bias) m.bias = next++;
  if (problem.epilogue.has_residual) m.residual = next++;
  return make_gemm_kernel(m);
}

std::unique_ptr<Kernel> make_matmul_kernel(const Call& call) {
  auto problem = matmul_problem(call);
  if (const auto* refusal = std::get_if<Refusal>(&problem)) throw InternalError("internal: " + refusal->reason);
  return make_gemm_kernel(std::get<MatmulProblem>(problem));
}

}  // namespace fulmen::cpu
