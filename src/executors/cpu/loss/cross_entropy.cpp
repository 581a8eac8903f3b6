#include "executors/cpu/loss/cross_entropy.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "core/half.h"
#include "core/parallel.h"
#include "executors/cpu/loss/row_functions.h"

namespace fulmen::cpu {

#define FULMEN_DECLARE_ROWS(target) \
  namespace target {                \
  template <class T>                \
  RowFunctions<T> row_table();      \
  }
FULMEN_DECLARE_ROWS(generic)
#if defined(FULMEN_X86)
FULMEN_DECLARE_ROWS(avx2)
FULMEN_DECLARE_ROWS(avx512)
#endif
#undef FULMEN_DECLARE_ROWS

template <class T>
const RowFunctions<T>& row_functions(Isa isa) {
  static const RowFunctions<T> plain = generic::row_table<T>();
#if defined(FULMEN_X86)
  static const RowFunctions<T> narrow = avx2::row_table<T>();
  static const RowFunctions<T> wide = avx512::row_table<T>();
  if (isa >= Isa::avx512) return wide;
  if (isa == Isa::avx2) return narrow;
#endif
  (void)isa;
  return plain;
}

namespace {

// Where the operands of the two ops stand; the gradient's has `grad` before them.
struct Rows {
  int64_t count = 1, classes = 1, stride = 0, target_stride = 0;
  DType dtype{}, target_dtype{};
  int64_t ignored = -100;
  double smoothing = 0;
  bool is_mean = false, is_none = false;
  std::string op;

  Rows(const Call& call, size_t first) : op(call.op->name) {
    const TensorType &logits = *call.inputs[first], &target = *call.inputs[first + 1];
    classes = logits.shape.back();
    if (logits.rank() == 2) count = logits.shape[0], stride = logits.strides[0];
    if (target.rank() == 1) target_stride = target.strides[0];
    dtype = logits.dtype;
    target_dtype = target.dtype;
    ignored = call.attrs->get_int("ignore_index");
    smoothing = call.attrs->get_float("label_smoothing");
    is_mean = call.attrs->get_text("reduction") == "mean";
    is_none = call.attrs->get_text("reduction") == "none";
  }

  // The class of a row, -1 if it counts nothing.
  int64_t target(const void* targets, int64_t row) const {
    const int64_t at = row * target_stride;
    const int64_t index = target_dtype == DType::i32 ? static_cast<const int32_t*>(targets)[at] : static_cast<const int64_t*>(targets)[at];
    if (index == ignored) return -1;
    if (index < 0 || index >= classes)
      throw ShapeError(op + ": target has " + std::to_string(index) + " at row " + std::to_string(row) + ", needed 0 to " + std::to_string(classes - 1));
    return index;
  }
  int64_t counting(const void* targets) const {
    int64_t rows = 0;
    for (int64_t row = 0; row < count; ++row) rows += target(targets, row) >= 0;
    return rows;
  }
  int64_t grain() const { return std::max<int64_t>(1, 16384 / classes); }
};

template <class T>
void set(void* memory, int64_t at, double value) {
  static_cast<T*>(memory)[at] = T(static_cast<float>(value));
}

template <class T>
class Forward final : public Kernel {
 public:
  Forward(const Call& call, Isa isa) : rows_(call, 0), functions_(row_functions<T>(isa)) {}
  size_t workspace_bytes() const override { return static_cast<size_t>(rows_.count) * sizeof(double); }
  void run(const RunContext& context, const void* const* inputs, void* const* outputs) const override {
    double* losses = static_cast<double*>(context.workspace);
    const T* logits = static_cast<const T*>(inputs[0]);
    parallel_for(rows_.count, rows_.grain(), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const T* x = logits + row * rows_.stride;
        const int64_t target = rows_.target(inputs[1], row);
        float sum = 0;
        const float lse = functions_.log_sum_exp(x, rows_.classes, rows_.smoothing > 0 ? &sum : nullptr);
        if (outputs[1]) static_cast<float*>(outputs[1])[row] = lse;
        double loss = 0;
        if (target >= 0) {
          loss = (1.0 - rows_.smoothing) * (static_cast<double>(lse) - static_cast<float>(x[target]));
          if (rows_.smoothing > 0) loss += rows_.smoothing * (static_cast<double>(lse) - static_cast<double>(sum) / static_cast<double>(rows_.classes));
        }
        losses[row] = loss;
      }
    });
    if (!outputs[0]) return;
    if (rows_.is_none) {
      for (int64_t row = 0; row < rows_.count; ++row) set<T>(outputs[0], row, losses[row]);
      return;
    }
    double total = 0;
    for (int64_t row = 0; row < rows_.count; ++row) total += losses[row];
    if (rows_.is_mean) total /= static_cast<double>(rows_.counting(inputs[1]));  // NaN if none counts, as in PyTorch
    set<T>(outputs[0], 0, total);
  }

 private:
  Rows rows_;
  const RowFunctions<T>& functions_;
};

template <class T>
class Gradient final : public Kernel {
 public:
  Gradient(const Call& call, Isa isa) : rows_(call, 1), functions_(row_functions<T>(isa)) {
    const TensorType& grad = *call.inputs[0];
    grad_stride_ = rows_.is_none && grad.rank() == 1 ? grad.strides[0] : 0;
    if (call.inputs.size() > 4 && call.inputs[4] && call.inputs[4]->rank() == 1) lse_stride_ = call.inputs[4]->strides[0];
  }
  void run(const RunContext&, const void* const* inputs, void* const* outputs) const override {
    const T* grads = static_cast<const T*>(inputs[0]);
    const T* logits = static_cast<const T*>(inputs[1]);
    const float* lse = static_cast<const float*>(inputs[4]);
    T* out = static_cast<T*>(outputs[0]);
    const double divisor = rows_.is_mean ? static_cast<double>(rows_.counting(inputs[2])) : 1.0;
    const float share = static_cast<float>(rows_.smoothing / static_cast<double>(rows_.classes));
    parallel_for(rows_.count, rows_.grain(), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const T* x = logits + row * rows_.stride;
        T* dx = out + row * rows_.classes;
        const int64_t target = rows_.target(inputs[2], row);
        if (target < 0) {
          std::fill_n(dx, rows_.classes, T(0.0f));
          continue;
        }
        const float row_lse = lse ? lse[row * lse_stride_] : functions_.log_sum_exp(x, rows_.classes, nullptr);
        const float scale = static_cast<float>(static_cast<double>(static_cast<float>(grads[row * grad_stride_])) / divisor);
        functions_.gradient(x, dx, rows_.classes, row_lse, share, scale);
        const double p = std::exp(static_cast<double>(static_cast<float>(x[target])) - row_lse);
        dx[target] = T(static_cast<float>((p - (1.0 - rows_.smoothing) - share) * scale));
      }
    });
  }

 private:
  Rows rows_;
  const RowFunctions<T>& functions_;
  int64_t grad_stride_ = 0, lse_stride_ = 0;
};

template <template <class> class K>
std::unique_ptr<Kernel> make(const Call& call, DType dtype) {
  if (dtype == DType::bf16) return std::make_unique<K<bf16>>(call, chosen_isa());
  if (dtype == DType::f16) return std::make_unique<K<f16>>(call, chosen_isa());
  return std::make_unique<K<float>>(call, chosen_isa());
}

}  // namespace

Claim claim_cross_entropy(const Call& call) {
  const std::string& op = call.op->name;
  const bool is_gradient = op == "cross_entropy_grad";
  const size_t first = is_gradient ? 1 : 0;
  const auto refuse = [&](RefusalCode code, const std::string& reason) { return Refusal{code, op + ": " + reason}; };
  const TensorType &logits = *call.inputs[first], &target = *call.inputs[first + 1];
  if (!is_half(logits.dtype) && logits.dtype != DType::f32)
    return refuse(RefusalCode::wrong_dtype, "logits is " + std::string(dtype_name(logits.dtype)) + ", cpu's row kernel takes f32, bf16 and f16");
  if (is_float(target.dtype)) return refuse(RefusalCode::unsupported_argument, "target holds probabilities, cpu's row kernel takes class indices");
  if (call.inputs.size() > first + 2 && call.inputs[first + 2])
    return refuse(RefusalCode::unsupported_argument, "weight is given, cpu's row kernel takes none");
  if (logits.rank() > 2) return refuse(RefusalCode::wrong_shape, "logits has " + std::to_string(logits.rank()) + " dims, cpu's row kernel takes 1 or 2");
  if (logits.element_count() == 0) return refuse(RefusalCode::degenerate, "logits is empty");
  if (logits.strides.back() != 1 && logits.shape.back() != 1)
    return refuse(RefusalCode::wrong_layout, "the classes of logits lie " + std::to_string(logits.strides.back()) + " elements apart, cpu's row kernel needs 1");
  if (is_gradient && call.inputs[0]->dtype != logits.dtype)
    return refuse(RefusalCode::wrong_dtype, "grad is " + std::string(dtype_name(call.inputs[0]->dtype)) + ", cpu's row kernel needs the dtype of logits");
  Plan plan;
  plan.forward.kernel = is_gradient ? "cross_entropy_row_gradient" : "cross_entropy_rows";
  plan.forward.workspace_bytes = is_gradient ? 0 : static_cast<size_t>(logits.element_count() / logits.shape.back()) * sizeof(double);
  return plan;
}

std::unique_ptr<Kernel> make_cross_entropy_kernel(const Call& call) {
  if (call.op->name == "cross_entropy_grad") return make<Gradient>(call, call.inputs[1]->dtype);
  return make<Forward>(call, call.inputs[0]->dtype);
}

}  // namespace fulmen::cpu
