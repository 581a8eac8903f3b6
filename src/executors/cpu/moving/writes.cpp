// Reads and writes at positions from index tensors: index, index_put, index_add; scatter, scatter_add. Each element of the
// result is one thread's and takes its additions in the order of the index, so threads don't change a bit. Halves are added
// up in f32 and rounded once.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

#include "core/half.h"
#include "core/parallel.h"
#include "executors/cpu/moving/indices.h"
#include "executors/cpu/moving/moving.h"
#include "executors/cpu/moving/strided_copy.h"
#include "ops/builder.h"
#include "ops/rules/dims.h"

namespace fulmen::cpu {
namespace {

int64_t normal(int64_t dim, int64_t rank) { return dim < 0 ? dim + rank : dim; }

// Offsets of all elements of a shape in row-major order.
std::vector<int64_t> offsets_of(const Dims& shape, const Dims& strides) {
  std::vector<int64_t> offsets(static_cast<size_t>(element_count(shape)));
  if (offsets.empty()) return offsets;
  Dims at(shape.size(), 0);
  int64_t offset = 0;
  for (int64_t& result : offsets) {
    result = offset;
    for (size_t d = shape.size(); d-- > 0;) {
      offset += strides[d];
      if (++at[d] < shape[d]) break;
      offset -= strides[d] * shape[d];
      at[d] = 0;
    }
  }
  return offsets;
}

// Strides of `type` seen in a shape that it broadcasts to.
Dims broadcast_strides(const TensorType& type, const Dims& shape) {
  Dims strides(shape.size(), 0);
  const size_t added = shape.size() - type.shape.size();
  for (size_t d = 0; d < type.shape.size(); ++d)
    if (type.shape[d] == shape[added + d]) strides[added + d] = type.strides[d];
  return strides;
}

bool lie_together(const std::vector<int64_t>& offsets) {
  for (size_t i = 0; i < offsets.size(); ++i)
    if (offsets[i] != static_cast<int64_t>(i)) return false;
  return true;
}

// How x[.., i, j, ..] reads x: the dims before the indexed ones, the picked elements, the dims behind them. The indexed
// part's own dims are those three groups in this order.
class Picking {
 public:
  Picking(const Call& call, const TensorType& x, const Dims& dims, size_t first_index, size_t last_index) : op_(call.op->name), first_(first_index) {
    const int64_t rank = x.rank();
    bool adjacent = true;
    for (size_t i = 0; i < dims.size(); ++i) {
      dims_.push_back(normal(dims[i], rank));
      sizes_.push_back(x.shape[static_cast<size_t>(dims_.back())]);
      strides_.push_back(x.strides[static_cast<size_t>(dims_.back())]);
      if (i > 0) adjacent &= dims_[i] == dims_[i - 1] + 1;
    }
    for (size_t i = first_index; i < last_index; ++i) picked_ = broadcast_shapes(picked_, call.inputs[i]->shape).value();
    for (size_t i = first_index; i < last_index; ++i) {
      TensorType spread = *call.inputs[i];
      spread.strides = broadcast_strides(spread, picked_);
      spread.shape = picked_;
      indices_.emplace_back(spread, op_);
    }
    Dims before_strides, behind_strides;
    for (int64_t d = 0; d < rank; ++d) {
      if (std::find(dims_.begin(), dims_.end(), d) != dims_.end()) continue;
      const bool is_before = adjacent && d < dims_[0];
      (is_before ? before_ : behind_).push_back(x.shape[static_cast<size_t>(d)]);
      (is_before ? before_strides : behind_strides).push_back(x.strides[static_cast<size_t>(d)]);
    }
    before_offsets_ = offsets_of(before_, before_strides);
    behind_offsets_ = offsets_of(behind_, behind_strides);
  }
  // Offsets in x of the picked elements.
  std::vector<int64_t> picked_offsets(const void* const* inputs) const {
    std::vector<int64_t> offsets(static_cast<size_t>(element_count(picked_)), 0);
    for (size_t j = 0; j < indices_.size(); ++j)
      for (size_t p = 0; p < offsets.size(); ++p)
        offsets[p] += indices_[j].position(inputs[first_ + j], static_cast<int64_t>(p), sizes_[j]) * strides_[j];
    return offsets;
  }
  const std::vector<int64_t>& before() const { return before_offsets_; }
  const std::vector<int64_t>& behind() const { return behind_offsets_; }
  // The same three groups of a tensor that broadcasts to the indexed part.
  void groups_of(const TensorType& type, std::vector<int64_t>& before, std::vector<int64_t>& picked, std::vector<int64_t>& behind) const {
    Dims shape = before_;
    shape.insert(shape.end(), picked_.begin(), picked_.end());
    shape.insert(shape.end(), behind_.begin(), behind_.end());
    const Dims strides = broadcast_strides(type, shape);
    const auto a = static_cast<std::ptrdiff_t>(before_.size()), b = a + static_cast<std::ptrdiff_t>(picked_.size());
    before = offsets_of(before_, Dims(strides.begin(), strides.begin() + a));
    picked = offsets_of(picked_, Dims(strides.begin() + a, strides.begin() + b));
    behind = offsets_of(behind_, Dims(strides.begin() + b, strides.end()));
  }
  bool is_empty() const { return before_offsets_.empty() || behind_offsets_.empty() || element_count(picked_) == 0; }

 private:
  std::string op_;
  size_t first_;
  Dims dims_, sizes_, strides_, picked_, before_, behind_;
  std::vector<Indices> indices_;
  std::vector<int64_t> before_offsets_, behind_offsets_;
};

// Contiguous result: rows of the dims behind, one for each element before and each picked one.
template <class T>
class Index final : public Kernel {
 public:
  explicit Index(const Call& call) : picking_(call, *call.inputs[0], call.attrs->get_dims("dims"), 1, call.inputs.size()) {
    together_ = lie_together(picking_.behind());
  }
  void run(const RunContext&, const void* const* inputs, void* const* outputs) const override {
    const std::vector<int64_t> picked = picking_.picked_offsets(inputs);
    if (picking_.is_empty()) return;
    const T* x = static_cast<const T*>(inputs[0]);
    T* y = static_cast<T*>(outputs[0]);
    const auto& behind = picking_.behind();
    const auto width = static_cast<int64_t>(behind.size()), columns = static_cast<int64_t>(picked.size());
    const int64_t rows = static_cast<int64_t>(picking_.before().size()) * columns;
    parallel_for(rows, std::max<int64_t>(1, 8192 / width), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const T* from = x + picking_.before()[static_cast<size_t>(row / columns)] + picked[static_cast<size_t>(row % columns)];
        T* to = y + row * width;
        if (together_) std::memcpy(to, from, static_cast<size_t>(width) * sizeof(T));
        else for (int64_t j = 0; j < width; ++j) to[j] = from[behind[static_cast<size_t>(j)]];
      }
    });
  }

 private:
  Picking picking_;
  bool together_;
};

template <class T>
constexpr bool is_half_type = std::is_same_v<T, f16> || std::is_same_v<T, bf16>;

// What sums of T are kept in.
template <class T>
using SumOf = std::conditional_t<is_half_type<T>, float, T>;

// The result begins as a copy of x. Half sums begin as a copy in the workspace and end rounded.
template <class T, bool adds>
class Writer : public Kernel {
 public:
  explicit Writer(const Call& call) : x_(*call.inputs[0]), out_(*call.outputs[0]) {}
  static constexpr bool widens = adds && is_half_type<T>;
  using Cell = std::conditional_t<widens, float, T>;
  size_t workspace_bytes() const override { return widens ? static_cast<size_t>(out_.element_count()) * sizeof(float) : 0; }
  void run(const RunContext& context, const void* const* inputs, void* const* outputs) const override {
    copy_strided(sizeof(T), x_.shape, {const_cast<void*>(inputs[0]), 0, x_.strides}, {outputs[0], 0, out_.strides});
    T* out = static_cast<T*>(outputs[0]);
    if constexpr (widens) {
      float* wide = static_cast<float*>(context.workspace);
      parallel_for(out_.element_count(), 16384, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) wide[i] = static_cast<float>(out[i]);
      });
      write(inputs, wide);
      parallel_for(out_.element_count(), 16384, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) out[i] = T(wide[i]);
      });
    } else {
      write(inputs, out);
    }
  }

 protected:
  virtual void write(const void* const* inputs, Cell* out) const = 0;
  static void put(Cell& to, T value) {
    if constexpr (!adds) to = value;
    else if constexpr (std::is_integral_v<T>) to = static_cast<T>(static_cast<std::make_unsigned_t<T>>(to) + static_cast<std::make_unsigned_t<T>>(value));
    else to += static_cast<Cell>(value);
  }
  TensorType x_, out_;
};

template <class T, bool adds>
class IndexWrite final : public Writer<T, adds> {
 public:
  using typename Writer<T, adds>::Cell;
  IndexWrite(const Call& call, const Dims& dims, size_t values, size_t first_index, size_t last_index)
      : Writer<T, adds>(call), picking_(call, *call.outputs[0], dims, first_index, last_index), values_(values) {
    picking_.groups_of(*call.inputs[values], before_, picked_, behind_);
  }

 protected:
  void write(const void* const* inputs, Cell* out) const override {
    const std::vector<int64_t> positions = picking_.picked_offsets(inputs);
    if (picking_.is_empty()) return;
    const T* values = static_cast<const T*>(inputs[values_]);
    const auto& before = picking_.before();
    const auto& behind = picking_.behind();
    const auto width = static_cast<int64_t>(behind.size());
    const int64_t grain = std::max<int64_t>(1, 16384 / static_cast<int64_t>(positions.size()));
    // A thread's part: some elements around the picked ones, for all picked ones in order.
    parallel_for(static_cast<int64_t>(before.size()) * width, grain, [&](int64_t begin, int64_t end) {
      while (begin < end) {
        const auto i = static_cast<size_t>(begin / width);
        const auto first = static_cast<size_t>(begin % width);
        const auto last = static_cast<size_t>(std::min<int64_t>(width, begin % width + end - begin));
        for (size_t p = 0; p < positions.size(); ++p) {
          Cell* to = out + before[i] + positions[p];
          const T* from = values + before_[i] + picked_[p];
          for (size_t j = first; j < last; ++j) this->put(to[behind[j]], from[behind_[j]]);
        }
        begin += static_cast<int64_t>(last - first);
      }
    });
  }

 private:
  Picking picking_;
  size_t values_;
  std::vector<int64_t> before_, picked_, behind_;
};

// scatter along a dim: a line of the index writes to the line of the result at the same place in the other dims.
template <class T, bool adds>
class Scatter final : public Writer<T, adds> {
 public:
  using typename Writer<T, adds>::Cell;
  explicit Scatter(const Call& call)
      : Writer<T, adds>(call), index_(*call.inputs[1]), src_(*call.inputs[2]), indices_(index_, call.op->name),
        dim_(static_cast<size_t>(dim_of(*call.attrs, this->out_.rank()))) {}

 protected:
  void write(const void* const* inputs, Cell* out) const override {
    const T* src = static_cast<const T*>(inputs[2]);
    const Dims& shape = index_.shape;
    const int64_t size = shape[dim_];
    if (index_.element_count() == 0) return;
    int64_t inner = 1;
    for (size_t d = dim_ + 1; d < shape.size(); ++d) inner *= shape[d];
    parallel_for(index_.element_count() / size, std::max<int64_t>(1, 8192 / size), [&](int64_t begin, int64_t end) {
      for (int64_t line = begin; line < end; ++line) {
        int64_t rest = line, to = 0, from = 0;
        for (size_t d = shape.size(); d-- > 0;) {
          if (d == dim_) continue;
          to += rest % shape[d] * this->out_.strides[d];
          from += rest % shape[d] * src_.strides[d];
          rest /= shape[d];
        }
        const int64_t first = line / inner * inner * size + line % inner;
        for (int64_t k = 0; k < size; ++k) {
          const int64_t position = indices_.position(inputs[1], first + k * inner, this->out_.shape[dim_]);
          this->put(out[to + position * this->out_.strides[dim_]], src[from + k * src_.strides[dim_]]);
        }
      }
    });
  }

 private:
  TensorType index_, src_;
  Indices indices_;
  size_t dim_;
};

template <class T>
std::unique_ptr<Kernel> make_write(const Call& call) {
  const std::string& op = call.op->name;
  if (op == "index") return std::make_unique<Index<T>>(call);
  if (op == "scatter") return std::make_unique<Scatter<T, false>>(call);
  if (op == "scatter_add") return std::make_unique<Scatter<T, true>>(call);
  if (op == "index_add") return std::make_unique<IndexWrite<T, true>>(call, Dims{dim_of(*call.attrs, call.inputs[0]->rank())}, 2, 1, 2);
  const Dims& dims = call.attrs->get_dims("dims");
  if (call.attrs->get_bool("accumulate")) return std::make_unique<IndexWrite<T, true>>(call, dims, 1, 2, call.inputs.size());
  return std::make_unique<IndexWrite<T, false>>(call, dims, 1, 2, call.inputs.size());
}

}  // namespace

std::unique_ptr<Kernel> make_write_kernel(const Call& call) {
  const std::string& op = call.op->name;
  if (op != "index" && op != "index_put" && op != "index_add" && op != "scatter" && op != "scatter_add") return nullptr;
  const TensorType& x = *call.inputs[0];
  if (x.rank() == 0 || !call.outputs[0]->is_contiguous()) return nullptr;
  const size_t first = op == "index_put" ? 2 : 1, last = op == "index" || op == "index_put" ? call.inputs.size() : 2;
  for (size_t i = first; i < last; ++i)
    if (!Indices::takes(*call.inputs[i])) return nullptr;
  if (op != "index" && call.inputs[op == "index_put" ? 1 : 2]->dtype != x.dtype) return nullptr;
  switch (x.dtype) {
    case DType::f32: return make_write<float>(call);
    case DType::f64: return make_write<double>(call);
    case DType::bf16: return make_write<bf16>(call);
    case DType::f16: return make_write<f16>(call);
    case DType::i64: return make_write<int64_t>(call);
    case DType::i32: return make_write<int32_t>(call);
    case DType::boolean:
      if (op == "index" || op == "scatter" || (op == "index_put" && !call.attrs->get_bool("accumulate"))) return make_write<uint8_t>(call);
      return nullptr;
    case DType::u8: return make_write<uint8_t>(call);
    default: return nullptr;
  }
}

}  // namespace fulmen::cpu
