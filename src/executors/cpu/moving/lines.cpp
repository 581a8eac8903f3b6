// Ops along the lines of one dim: cumsum, cumprod, sort, topk. A line is one thread's, so threads don't change a bit.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "core/half.h"
#include "core/parallel.h"
#include "executors/cpu/moving/moving.h"
#include "ops/rules/dims.h"

namespace fulmen::cpu {
namespace {

// The lines of a tensor along a dim: where each begins, the step between its elements.
class Lines {
 public:
  Lines(const TensorType& type, int64_t dim) : shape_(type.shape), strides_(type.strides) {
    if (shape_.empty()) return;
    const auto d = static_cast<size_t>(dim);
    size_ = shape_[d];
    step_ = strides_[d];
    shape_.erase(shape_.begin() + dim);
    strides_.erase(strides_.begin() + dim);
  }
  int64_t size() const { return size_; }
  int64_t step() const { return step_; }
  int64_t count() const { return element_count(shape_); }
  int64_t begin(int64_t line) const {
    int64_t offset = 0;
    for (size_t d = shape_.size(); d-- > 0;) {
      offset += line % shape_[d] * strides_[d];
      line /= shape_[d];
    }
    return offset;
  }

 private:
  Dims shape_, strides_;
  int64_t size_ = 1, step_ = 0;
};

int64_t lines_dim(const Call& call) { return call.inputs[0]->rank() == 0 ? 0 : dim_of(*call.attrs, call.inputs[0]->rank()); }

template <class T>
auto number(T x) {
  if constexpr (std::is_same_v<T, f16> || std::is_same_v<T, bf16>) return static_cast<float>(x);
  else return x;
}

// Floats are summed in f64, integers wrap.
template <class In, class Out, bool is_sum>
class Cumulative final : public Kernel {
 public:
  explicit Cumulative(const Call& call) : from_(*call.inputs[0], lines_dim(call)), to_(*call.outputs[0], lines_dim(call)) {}
  void run(const RunContext&, const void* const* inputs, void* const* outputs) const override {
    const In* x = static_cast<const In*>(inputs[0]);
    Out* y = static_cast<Out*>(outputs[0]);
    parallel_for(from_.count(), std::max<int64_t>(1, 8192 / std::max<int64_t>(from_.size(), 1)), [&](int64_t begin, int64_t end) {
      for (int64_t line = begin; line < end; ++line) {
        const In* source = x + from_.begin(line);
        Out* target = y + to_.begin(line);
        Sum total = static_cast<Sum>(is_sum ? 0 : 1);
        for (int64_t k = 0; k < from_.size(); ++k) {
          const auto value = static_cast<Sum>(convert(source[k * from_.step()]));
          total = is_sum ? total + value : total * value;
          target[k * to_.step()] = result(total);
        }
      }
    });
  }

 private:
  static constexpr bool is_float = !std::is_same_v<Out, int64_t>;
  using Sum = std::conditional_t<is_float, double, uint64_t>;
  // Elements take the result's dtype before they are added.
  static auto convert(In x) {
    if constexpr (is_float) return number(Out(static_cast<Rounded>(number(x))));
    else return static_cast<int64_t>(x);
  }
  using Rounded = std::conditional_t<std::is_same_v<Out, double>, double, float>;
  static Out result(Sum total) {
    if constexpr (is_float) return Out(static_cast<Rounded>(total));
    else return static_cast<Out>(total);
  }
  Lines from_, to_;
};

template <bool is_sum>
std::unique_ptr<Kernel> make_cumulative(const Call& call) {
  const DType in = call.inputs[0]->dtype, out = call.outputs[0]->dtype;
  if (out == DType::i64) {
    switch (in) {
      case DType::boolean:
      case DType::u8: return std::make_unique<Cumulative<uint8_t, int64_t, is_sum>>(call);
      case DType::i8: return std::make_unique<Cumulative<int8_t, int64_t, is_sum>>(call);
      case DType::i16: return std::make_unique<Cumulative<int16_t, int64_t, is_sum>>(call);
      case DType::i32: return std::make_unique<Cumulative<int32_t, int64_t, is_sum>>(call);
      case DType::i64: return std::make_unique<Cumulative<int64_t, int64_t, is_sum>>(call);
      default: return nullptr;
    }
  }
  if (in == DType::f32 && out == DType::f32) return std::make_unique<Cumulative<float, float, is_sum>>(call);
  if (in == DType::f64 && out == DType::f64) return std::make_unique<Cumulative<double, double, is_sum>>(call);
  if (in == DType::bf16 && out == DType::bf16) return std::make_unique<Cumulative<bf16, bf16, is_sum>>(call);
  if (in == DType::f16 && out == DType::f16) return std::make_unique<Cumulative<f16, f16, is_sum>>(call);
  if (in == DType::bf16 && out == DType::f32) return std::make_unique<Cumulative<bf16, float, is_sum>>(call);
  if (in == DType::f16 && out == DType::f32) return std::make_unique<Cumulative<f16, float, is_sum>>(call);
  return nullptr;
}

// The first elements of each line in order, NaN as the largest, equal ones as they stand.
template <class T>
class Order final : public Kernel {
 public:
  Order(const Call& call, bool descending)
      : from_(*call.inputs[0], lines_dim(call)), values_(*call.outputs[0], lines_dim(call)), positions_(*call.outputs[1], lines_dim(call)),
        descending_(descending) {}
  void run(const RunContext&, const void* const* inputs, void* const* outputs) const override {
    const T* x = static_cast<const T*>(inputs[0]);
    T* values = static_cast<T*>(outputs[0]);
    int64_t* positions = static_cast<int64_t*>(outputs[1]);
    const int64_t size = from_.size(), wanted = values_.size();
    if (wanted == 0) return;
    parallel_for(from_.count(), std::max<int64_t>(1, 1024 / std::max<int64_t>(size, 1)), [&](int64_t begin, int64_t end) {
      std::vector<int64_t> order(static_cast<size_t>(size));
      for (int64_t line = begin; line < end; ++line) {
        const T* source = x + from_.begin(line);
        const auto before = [&](int64_t j, int64_t k) {
          const auto a = number(source[j * from_.step()]), b = number(source[k * from_.step()]);
          if (less(a, b)) return !descending_;
          if (less(b, a)) return descending_;
          return j < k;
        };
        std::iota(order.begin(), order.end(), int64_t{0});
        if (wanted < size) std::partial_sort(order.begin(), order.begin() + wanted, order.end(), before);
        else std::sort(order.begin(), order.end(), before);
        T* value = values + values_.begin(line);
        int64_t* position = positions + positions_.begin(line);
        for (int64_t k = 0; k < wanted; ++k) {
          value[k * values_.step()] = source[order[static_cast<size_t>(k)] * from_.step()];
          position[k * positions_.step()] = order[static_cast<size_t>(k)];
        }
      }
    });
  }

 private:
  template <class U>
  static bool less(U a, U b) {
    if constexpr (std::is_floating_point_v<U>)
      if (std::isnan(b)) return !std::isnan(a);
    return a < b;
  }
  Lines from_, values_, positions_;
  bool descending_;
};

}  // namespace

std::unique_ptr<Kernel> make_line_kernel(const Call& call) {
  const std::string& op = call.op->name;
  if (op == "cumsum") return make_cumulative<true>(call);
  if (op == "cumprod") return make_cumulative<false>(call);
  if (op != "sort" && op != "topk") return nullptr;
  if (call.outputs.size() < 2 || !call.outputs[0] || !call.outputs[1]) return nullptr;
  const bool descending = call.attrs->get_bool(op == "sort" ? "descending" : "largest");
  switch (call.inputs[0]->dtype) {
    case DType::f32: return std::make_unique<Order<float>>(call, descending);
    case DType::f64: return std::make_unique<Order<double>>(call, descending);
    case DType::bf16: return std::make_unique<Order<bf16>>(call, descending);
    case DType::f16: return std::make_unique<Order<f16>>(call, descending);
    case DType::i64: return std::make_unique<Order<int64_t>>(call, descending);
    case DType::i32: return std::make_unique<Order<int32_t>>(call, descending);
    case DType::boolean:
    case DType::u8: return std::make_unique<Order<uint8_t>>(call, descending);
    default: return nullptr;
  }
}

}  // namespace fulmen::cpu
