// cat, pad, slice_scatter, flip: strided copies into parts of the result.
#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "core/half.h"
#include "executors/cpu/moving/moving.h"
#include "executors/cpu/moving/strided_copy.h"
#include "ops/rules/dims.h"

namespace fulmen::cpu {
namespace {

// A number in the bytes of a dtype.
std::vector<uint8_t> number_bytes(double value, DType dtype) {
  std::vector<uint8_t> bytes(dtype_bytes(dtype));
  const auto put = [&](auto x) { std::memcpy(bytes.data(), &x, sizeof(x)); };
  switch (dtype) {
    case DType::boolean: put(static_cast<uint8_t>(value != 0)); break;
    case DType::u8: put(static_cast<uint8_t>(static_cast<int64_t>(value))); break;
    case DType::i8: put(static_cast<int8_t>(static_cast<int64_t>(value))); break;
    case DType::i16: put(static_cast<int16_t>(static_cast<int64_t>(value))); break;
    case DType::i32: put(static_cast<int32_t>(static_cast<int64_t>(value))); break;
    case DType::i64: put(static_cast<int64_t>(value)); break;
    case DType::f16: put(f16(static_cast<float>(value))); break;
    case DType::bf16: put(bf16(static_cast<float>(value))); break;
    case DType::f32: put(static_cast<float>(value)); break;
    case DType::f64: put(value); break;
  }
  return bytes;
}

// Copies of inputs, in order, into strided parts of the one output; before them, if asked for, a fill of everything.
class CopyKernel final : public Kernel {
 public:
  struct Part {
    size_t input;
    Dims shape, from, to;
    int64_t to_offset = 0, from_offset = 0;
  };
  CopyKernel(const TensorType& out, std::vector<Part> parts, std::vector<uint8_t> fill = {})
      : out_(out), parts_(std::move(parts)), fill_(std::move(fill)) {}
  void run(const RunContext&, const void* const* inputs, void* const* outputs) const override {
    const size_t bytes = dtype_bytes(out_.dtype);
    if (!fill_.empty()) fill_strided(bytes, out_.shape, fill_.data(), {outputs[0], 0, out_.strides});
    for (const Part& part : parts_)
      copy_strided(bytes, part.shape, {const_cast<void*>(inputs[part.input]), part.from_offset, part.from}, {outputs[0], part.to_offset, part.to});
  }

 private:
  TensorType out_;
  std::vector<Part> parts_;
  std::vector<uint8_t> fill_;
};

}  // namespace

std::unique_ptr<Kernel> make_copy_kernel(const Call& call) {
  const std::string& op = call.op->name;
  const TensorType& out = *call.outputs[0];
  std::vector<CopyKernel::Part> parts;
  if (op == "cat") {
    const auto dim = static_cast<size_t>(dim_of(*call.attrs, out.rank()));
    int64_t begin = 0;
    for (size_t i = 0; i < call.inputs.size(); ++i) {
      const TensorType& x = *call.inputs[i];
      if (x.dtype != out.dtype) return nullptr;
      parts.push_back({i, x.shape, x.strides, out.strides, begin * out.strides[dim]});
      begin += x.shape[dim];
    }
    return std::make_unique<CopyKernel>(out, std::move(parts));
  }
  if (op == "pad") {
    const Dims& pads = call.attrs->get_dims("pads");
    const TensorType& x = *call.inputs[0];
    int64_t offset = 0;
    for (size_t d = 0; d < x.shape.size(); ++d) offset += pads[2 * d] * out.strides[d];
    parts.push_back({0, x.shape, x.strides, out.strides, offset});
    return std::make_unique<CopyKernel>(out, std::move(parts), number_bytes(call.attrs->get_float("value"), out.dtype));
  }
  if (op == "slice_scatter") {
    const TensorType &x = *call.inputs[0], &src = *call.inputs[1];
    const auto dim = static_cast<size_t>(dim_of(*call.attrs, x.rank()));
    int64_t begin = call.attrs->has("begin") ? call.attrs->get_int("begin") : 0;
    if (begin < 0) begin += x.shape[dim];
    begin = std::clamp<int64_t>(begin, 0, x.shape[dim]);
    Dims strides = out.strides;
    strides[dim] *= call.attrs->has("step") ? call.attrs->get_int("step") : 1;
    parts.push_back({0, x.shape, x.strides, out.strides, 0});
    parts.push_back({1, src.shape, src.strides, strides, begin * out.strides[dim]});
    return std::make_unique<CopyKernel>(out, std::move(parts));
  }
  if (op == "flip") {
    const TensorType& x = *call.inputs[0];
    CopyKernel::Part part{0, x.shape, x.strides, out.strides};
    if (x.element_count() > 0)
      for (int64_t dim : call.attrs->get_dims("dims")) {
        const auto d = static_cast<size_t>(dim < 0 ? dim + x.rank() : dim);
        part.from_offset += (x.shape[d] - 1) * part.from[d];
        part.from[d] = -part.from[d];
      }
    parts.push_back(std::move(part));
    return std::make_unique<CopyKernel>(out, std::move(parts));
  }
  return nullptr;
}

}  // namespace fulmen::cpu
