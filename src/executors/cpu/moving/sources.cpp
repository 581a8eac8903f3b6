// arange, and uniform draws of Philox (dropout masks are drawn on the tile machine). Element n of a draw depends on the seed and n alone
// (core/philox.h), whatever the threads.
#include <algorithm>
#include <string>

#include "core/half.h"
#include "core/parallel.h"
#include "core/philox.h"
#include "executors/cpu/moving/moving.h"

namespace fulmen::cpu {
namespace {

template <class T>
class Arange final : public Kernel {
 public:
  explicit Arange(const Call& call) : count_(call.outputs[0]->element_count()) {
    whole_ = std::holds_alternative<int64_t>(*call.attrs->find("start")) && std::holds_alternative<int64_t>(*call.attrs->find("step"));
    start_ = call.attrs->get_float("start");
    step_ = call.attrs->get_float("step");
    if (whole_) whole_start_ = call.attrs->get_int("start"), whole_step_ = call.attrs->get_int("step");
  }
  void run(const RunContext&, const void* const*, void* const* outputs) const override {
    T* out = static_cast<T*>(outputs[0]);
    parallel_for(count_, 65536, [&](int64_t begin, int64_t end) {
      for (int64_t k = begin; k < end; ++k) {
        if constexpr (std::is_integral_v<T>)
          out[k] = whole_ ? static_cast<T>(whole_start_ + k * whole_step_) : static_cast<T>(static_cast<int64_t>(start_ + static_cast<double>(k) * step_));
        else if constexpr (sizeof(T) == 2)
          out[k] = T(static_cast<float>(start_ + static_cast<double>(k) * step_));
        else
          out[k] = static_cast<T>(start_ + static_cast<double>(k) * step_);
      }
    });
  }

 private:
  int64_t count_, whole_start_ = 0, whole_step_ = 1;
  double start_, step_;
  bool whole_;
};

// Calls put(n, word) for all elements; 64 neighbours come from 16 counters.
template <class Put>
void draw(uint64_t key, uint64_t offset, int64_t count, Put&& put) {
  parallel_for((count + 63) / 64, 64, [&](int64_t begin, int64_t end) {
    for (int64_t group = begin; group < end; ++group)
      for (int64_t k = 0; k < 16; ++k) {
        const PhiloxBlock block = philox4x32(key, offset + 16 * static_cast<uint64_t>(group) + static_cast<uint64_t>(k), 0);
        for (int64_t w = 0; w < 4; ++w) {
          const int64_t n = group * 64 + w * 16 + k;
          if (n < count) put(n, block.word[w]);
        }
      }
  });
}

class Draw final : public Kernel {
 public:
  explicit Draw(const Call& call)
      : count_(call.outputs[0]->element_count()), seed_stride_(call.inputs[0]->strides[0]), dtype_(call.outputs[0]->dtype),
        offset_(static_cast<uint64_t>(call.attrs->get_int("offset"))) {}
  void run(const RunContext&, const void* const* inputs, void* const* outputs) const override {
    const int64_t* seed = static_cast<const int64_t*>(inputs[0]);
    const uint64_t key = static_cast<uint64_t>(seed[0]), offset = static_cast<uint64_t>(seed[seed_stride_]) + offset_;
    void* out = outputs[0];
    switch (dtype_) {
      case DType::f32:
        draw(key, offset, count_, [&](int64_t n, uint32_t word) { static_cast<float*>(out)[n] = uniform_of_word(word); });
        break;
      case DType::bf16:
        draw(key, offset, count_, [&](int64_t n, uint32_t word) { static_cast<bf16*>(out)[n] = bf16(static_cast<float>(word >> 24) * 0x1p-8f); });
        break;
      case DType::f16:
        draw(key, offset, count_, [&](int64_t n, uint32_t word) { static_cast<f16*>(out)[n] = f16(static_cast<float>(word >> 21) * 0x1p-11f); });
        break;
      default:
        draw(key, offset, count_, [&](int64_t n, uint32_t word) { static_cast<double*>(out)[n] = static_cast<double>(uniform_of_word(word)); });
    }
  }

 private:
  int64_t count_, seed_stride_;
  DType dtype_;
  uint64_t offset_;
};

}  // namespace

std::unique_ptr<Kernel> make_source_kernel(const Call& call) {
  const std::string& op = call.op->name;
  if (op == "uniform") return std::make_unique<Draw>(call);
  if (op != "arange") return nullptr;
  switch (call.outputs[0]->dtype) {
    case DType::u8: return std::make_unique<Arange<uint8_t>>(call);
    case DType::i8: return std::make_unique<Arange<int8_t>>(call);
    case DType::i16: return std::make_unique<Arange<int16_t>>(call);
    case DType::i32: return std::make_unique<Arange<int32_t>>(call);
    case DType::i64: return std::make_unique<Arange<int64_t>>(call);
    case DType::f16: return std::make_unique<Arange<f16>>(call);
    case DType::bf16: return std::make_unique<Arange<bf16>>(call);
    case DType::f32: return std::make_unique<Arange<float>>(call);
    case DType::f64: return std::make_unique<Arange<double>>(call);
    default: return nullptr;
  }
}

}  // namespace fulmen::cpu
