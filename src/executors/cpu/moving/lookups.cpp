// gather, index_select, embedding and its gradient. An index outside is an error when it runs, as the ops' entries say.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

#include "core/error.h"
#include "core/half.h"
#include "core/parallel.h"
#include "executors/cpu/moving/indices.h"
#include "executors/cpu/moving/moving.h"
#include "ops/rules/dims.h"

namespace fulmen::cpu {
namespace {

template <class T>
void copy_elements(const void* from, int64_t from_at, int64_t from_stride, void* to, int64_t to_at, int64_t count) {
  const T* source = static_cast<const T*>(from) + from_at;
  T* target = static_cast<T*>(to) + to_at;
  if (from_stride == 1) std::memcpy(target, source, static_cast<size_t>(count) * sizeof(T));
  else for (int64_t i = 0; i < count; ++i) target[i] = source[i * from_stride];
}
using CopyElements = void (*)(const void*, int64_t, int64_t, void*, int64_t, int64_t);
CopyElements copy_elements_of(DType dtype) {
  switch (dtype_bytes(dtype)) {
    case 1: return copy_elements<uint8_t>;
    case 2: return copy_elements<uint16_t>;
    case 4: return copy_elements<uint32_t>;
    default: return copy_elements<uint64_t>;
  }
}

class Embedding final : public Kernel {
 public:
  explicit Embedding(const Call& call) : weight_(*call.inputs[0]), indices_(*call.inputs[1], call.op->name), copy_(copy_elements_of(weight_.dtype)) {}
  void run(const RunContext&, const void* const* inputs, void* const* outputs) const override {
    const int64_t width = weight_.shape[1];
    parallel_for(indices_.count(), std::max<int64_t>(1, 8192 / std::max<int64_t>(width, 1)), [&](int64_t begin, int64_t end) {
      for (int64_t k = begin; k < end; ++k)
        copy_(inputs[0], indices_.row(inputs[1], k, weight_.shape[0]) * weight_.strides[0], weight_.strides[1], outputs[0], k * width, width);
    });
  }

 private:
  TensorType weight_;
  Indices indices_;
  CopyElements copy_;
};

// Rows of the table in order; each sums its gradients in the order of the index, in f32. So threads don't change a bit.
template <class T>
class EmbeddingGrad final : public Kernel {
 public:
  explicit EmbeddingGrad(const Call& call) : grad_(*call.inputs[0]), indices_(*call.inputs[1], call.op->name), rows_(call.outputs[0]->shape[0]) {
    if (call.attrs->has("padding_idx")) {
      padding_ = call.attrs->get_int("padding_idx");
      if (padding_ < 0) padding_ += rows_;
    }
  }
  // First hit of each row, next hit of each position, last hit of each row while the lists are made.
  size_t workspace_bytes() const override { return static_cast<size_t>(2 * rows_ + indices_.count()) * sizeof(int64_t); }
  void run(const RunContext& context, const void* const* inputs, void* const* outputs) const override {
    int64_t* first = static_cast<int64_t*>(context.workspace);
    int64_t* last = first + rows_;
    int64_t* next = last + rows_;
    std::fill_n(first, rows_, int64_t{-1});
    for (int64_t k = 0; k < indices_.count(); ++k) {
      const int64_t row = indices_.row(inputs[1], k, rows_);
      next[k] = -1;
      if (row == padding_) continue;
      if (first[row] < 0) first[row] = k;
      else next[last[row]] = k;
      last[row] = k;
    }
    const int64_t width = grad_.shape.back(), step = grad_.strides.back();
    const T* grads = static_cast<const T*>(inputs[0]);
    T* table = static_cast<T*>(outputs[0]);
    parallel_for(rows_, std::max<int64_t>(1, 16384 / std::max<int64_t>(width, 1)), [&](int64_t begin, int64_t end) {
      std::vector<float> sum(std::is_same_v<T, float> ? 0 : static_cast<size_t>(width));
      for (int64_t row = begin; row < end; ++row) {
        T* out = table + row * width;
        if constexpr (std::is_same_v<T, float>) {
          std::fill_n(out, width, 0.0f);
          for (int64_t k = first[row]; k >= 0; k = next[k]) add(grads + grad_offset(k), step, out, width);
        } else {
          std::fill(sum.begin(), sum.end(), 0.0f);
          for (int64_t k = first[row]; k >= 0; k = next[k]) add(grads + grad_offset(k), step, sum.data(), width);
          for (int64_t j = 0; j < width; ++j) out[j] = T(sum[static_cast<size_t>(j)]);
        }
      }
    });
  }

 private:
  static void add(const T* from, int64_t step, float* to, int64_t width) {
    if (step == 1) for (int64_t j = 0; j < width; ++j) to[j] += static_cast<float>(from[j]);
    else for (int64_t j = 0; j < width; ++j) to[j] += static_cast<float>(from[j * step]);
  }
  int64_t grad_offset(int64_t k) const {
    int64_t result = 0;
    for (size_t d = grad_.shape.size() - 1; d-- > 0;) {
      result += k % grad_.shape[d] * grad_.strides[d];
      k /= grad_.shape[d];
    }
    return result;
  }
  TensorType grad_;
  Indices indices_;
  int64_t rows_, padding_ = -1;
};

// out[.., k, ..] = x[.., index[k], ..]
class IndexSelect final : public Kernel {
 public:
  IndexSelect(const Call& call, size_t dim) : x_(*call.inputs[0]), indices_(*call.inputs[1], call.op->name), dim_(dim), copy_(copy_elements_of(x_.dtype)) {}
  void run(const RunContext&, const void* const* inputs, void* const* outputs) const override {
    // Runs of the last dim, or single elements where the last dim is the one looked up.
    const bool is_last = dim_ + 1 == x_.shape.size();
    Dims outer = x_.shape;
    outer[dim_] = indices_.count();
    const int64_t run = is_last ? 1 : outer.back();
    if (!is_last) outer.pop_back();
    const int64_t rows = element_count(outer);
    parallel_for(rows, std::max<int64_t>(1, 8192 / std::max<int64_t>(run, 1)), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        int64_t rest = row, from = 0;
        for (size_t d = outer.size(); d-- > 0;) {
          const int64_t i = rest % outer[d];
          rest /= outer[d];
          from += (d == dim_ ? indices_.position(inputs[1], i, x_.shape[dim_]) : i) * x_.strides[d];
        }
        copy_(inputs[0], from, is_last ? 1 : x_.strides.back(), outputs[0], row * run, run);
      }
    });
  }

 private:
  TensorType x_;
  Indices indices_;
  size_t dim_;
  CopyElements copy_;
};

class Gather final : public Kernel {
 public:
  Gather(const Call& call, size_t dim) : x_(*call.inputs[0]), index_(*call.inputs[1]), indices_(index_, call.op->name), dim_(dim), copy_(copy_elements_of(x_.dtype)) {}
  void run(const RunContext&, const void* const* inputs, void* const* outputs) const override {
    parallel_for(indices_.count(), 4096, [&](int64_t begin, int64_t end) {
      for (int64_t k = begin; k < end; ++k) {
        int64_t rest = k, from = 0;
        for (size_t d = index_.shape.size(); d-- > 0;) {
          const int64_t i = rest % index_.shape[d];
          rest /= index_.shape[d];
          from += (d == dim_ ? indices_.position(inputs[1], k, x_.shape[dim_]) : i) * x_.strides[d];
        }
        copy_(inputs[0], from, 1, outputs[0], k, 1);
      }
    });
  }

 private:
  TensorType x_, index_;
  Indices indices_;
  size_t dim_;
  CopyElements copy_;
};

}  // namespace

std::unique_ptr<Kernel> make_lookup_kernel(const Call& call) {
  const std::string& op = call.op->name;
  if (op != "embedding" && op != "embedding_grad" && op != "gather" && op != "index_select") return nullptr;
  if (!Indices::takes(*call.inputs[1])) return nullptr;
  if (op == "embedding") return std::make_unique<Embedding>(call);
  if (op == "embedding_grad") {
    switch (call.inputs[0]->dtype) {
      case DType::f32: return std::make_unique<EmbeddingGrad<float>>(call);
      case DType::bf16: return std::make_unique<EmbeddingGrad<bf16>>(call);
      case DType::f16: return std::make_unique<EmbeddingGrad<f16>>(call);
      default: return nullptr;
    }
  }
  if (call.inputs[0]->rank() == 0) return nullptr;
  const auto dim = static_cast<size_t>(dim_of(*call.attrs, call.inputs[0]->rank()));
  if (op == "gather") return std::make_unique<Gather>(call, dim);
  return std::make_unique<IndexSelect>(call, dim);
}

}  // namespace fulmen::cpu
