#include "executors/cpu/attention/attention.h"

#include <limits>

#include "core/error.h"
#include "core/parallel.h"
#include "executors/cpu/attention/arguments.h"
#include "executors/cpu/dispatch.h"

namespace fulmen::cpu {

#define FULMEN_DECLARE(target) \
  namespace target {           \
  AttentionKernels attention_kernels(); \
  }
FULMEN_DECLARE(generic)
#if FULMEN_X86
FULMEN_DECLARE(avx2)
FULMEN_DECLARE(avx512)
FULMEN_DECLARE(avx512_bf16)
FULMEN_DECLARE(amx)
#endif
#undef FULMEN_DECLARE

namespace {

// The targets with a bf16 product have kernels for bf16 alone; anything else runs on the target below them.
AttentionKernels kernels_of(Isa isa, bool in_bf16) {
  if (!in_bf16 && (isa == Isa::amx || isa == Isa::avx512_bf16)) isa = Isa::avx512;
  switch (isa) {
#if FULMEN_X86
    case Isa::amx: return amx::attention_kernels();
    case Isa::avx512_bf16: return avx512_bf16::attention_kernels();
    case Isa::avx512: return avx512::attention_kernels();
    case Isa::avx2: return avx2::attention_kernels();
#endif
    default: return generic::attention_kernels();
  }
}

AttentionView view_of(const TensorType& type) {
  AttentionView view;
  view.present = true;
  view.dtype = type.dtype;
  for (size_t d = 0; d < 4; ++d) view.stride[d] = type.shape[d] == 1 ? 0 : type.strides[d];
  // A last dim of one element reads and writes as contiguous.
  if (type.shape[3] == 1) view.stride[3] = 1;
  return view;
}

int64_t stride_of(const std::optional<TensorType>& type) { return type && type->shape[0] > 1 ? type->strides[0] : 0; }

AttentionArguments arguments_of(const SdpaCall& call) {
  AttentionArguments a;
  a.batch = call.batch();
  a.heads = call.heads();
  a.key_heads = call.key_heads();
  a.group = a.key_heads > 0 ? a.heads / a.key_heads : 1;
  a.query_len = call.query_len();
  a.key_len = call.key_len();
  a.head_dim = call.head_dim();
  a.value_dim = call.value_dim();
  a.query = view_of(call.query);
  a.key = view_of(call.key);
  a.value = view_of(call.value);
  if (call.mask) {
    a.mask = view_of(*call.mask);
    const bool one_key = call.mask->shape[3] == 1;
    a.mask.stride[3] = one_key ? 0 : call.mask->strides[3];
    for (size_t d = 0; d < 4; ++d) a.mask_shape[d] = call.mask->shape[d];
  }
  a.has_sink = call.sink.has_value();
  a.has_slopes = call.alibi_slopes.has_value();
  a.has_key_lengths = call.key_lengths.has_value();
  a.sink_stride = stride_of(call.sink);
  a.slopes_stride = stride_of(call.alibi_slopes);
  a.query_offsets_stride = stride_of(call.query_offsets);
  a.key_offsets_stride = stride_of(call.key_offsets);
  a.key_lengths_stride = stride_of(call.key_lengths);
  a.seed_stride = stride_of(call.seed);
  a.sequences = call.query_offsets ? call.query_offsets->shape[0] - 1 : 0;
  constexpr int64_t far = std::numeric_limits<int64_t>::max() / 4;
  a.left = call.window_left < 0 ? far : call.window_left;
  a.right = call.window_right < 0 ? far : call.window_right;
  if (call.is_causal) a.right = 0;
  a.lower_right = call.lower_right;
  a.dropout_p = call.dropout_p;
  a.scale = static_cast<float>(call.scale);
  a.softcap = static_cast<float>(call.softcap);
  a.in_bf16 = call.query.dtype == DType::bf16 && call.key.dtype == DType::bf16 && call.value.dtype == DType::bf16;
  a.threads = thread_count();
  return a;
}

bool is_empty(const AttentionArguments& a) { return a.batch == 0 || a.heads == 0; }

class AttentionForward final : public Kernel {
 public:
  AttentionForward(const AttentionArguments& arguments, const AttentionKernels& kernels) : arguments_(arguments), kernels_(kernels) {}
  size_t workspace_bytes() const override { return is_empty(arguments_) ? 0 : kernels_.forward_workspace(arguments_); }
  void run(const RunContext& context, const void* const* inputs, void* const* outputs) const override {
    if (is_empty(arguments_)) return;
    FULMEN_CHECK(context.workspace != nullptr);
    void* const results[] = {outputs[0], arguments_.has_lse ? outputs[1] : nullptr};
    kernels_.forward(arguments_, {inputs, results, context.workspace});
  }

 private:
  AttentionArguments arguments_;
  AttentionKernels kernels_;
};

class AttentionBackward final : public Kernel {
 public:
  AttentionBackward(const AttentionArguments& arguments, const AttentionKernels& kernels) : arguments_(arguments), kernels_(kernels) {}
  size_t workspace_bytes() const override { return is_empty(arguments_) ? 0 : kernels_.backward_workspace(arguments_); }
  void run(const RunContext& context, const void* const* inputs, void* const* outputs) const override;

 private:
  AttentionArguments arguments_;
  AttentionKernels kernels_;
};

void AttentionBackward::run(const RunContext& context, const void* const* inputs, void* const* outputs) const {
  const AttentionArguments& a = arguments_;
  if (is_empty(a)) {
    // No scores: the gradients that have elements all the same are zero.
    if (a.mask_grad.present)
      for (int64_t b = 0; b < a.mask_shape[0]; ++b)
        for (int64_t h = 0; h < a.mask_shape[1]; ++h)
          for (int64_t i = 0; i < a.mask_shape[2]; ++i)
            for (int64_t j = 0; j < a.mask_shape[3]; ++j) {
              const int64_t at = (a.mask_grad.offset(b, h, i) + j * a.mask_grad.stride[3]) * static_cast<int64_t>(dtype_bytes(a.mask_grad.dtype));
              for (size_t byte = 0; byte < dtype_bytes(a.mask_grad.dtype); ++byte) static_cast<char*>(outputs[3])[static_cast<size_t>(at) + byte] = 0;
            }
    for (int64_t h = 0; h < a.heads; ++h) {
      if (a.wants_sink_grad) static_cast<float*>(outputs[4])[h * a.sink_grad_stride] = 0.0f;
      if (a.wants_slopes_grad) static_cast<float*>(outputs[5])[h * a.slopes_grad_stride] = 0.0f;
    }
    return;
  }
  FULMEN_CHECK(context.workspace != nullptr);
  kernels_.backward(a, {inputs, outputs, context.workspace});
}

Refusal refuse(RefusalCode code, std::string reason) { return {code, "sdpa: " + std::move(reason)}; }

}  // namespace

std::vector<AttentionSegment> attention_segments(const AttentionArguments& a, const AttentionRun& run) {
  std::vector<AttentionSegment> segments;
  const auto* lengths = static_cast<const int32_t*>(run.inputs[sdpa_key_lengths]);
  const auto open_end = [&](int64_t batch) {
    return lengths ? std::clamp<int64_t>(lengths[batch * a.key_lengths_stride], 0, a.key_len) : a.key_len;
  };
  if (a.sequences <= 0) {
    for (int64_t b = 0; b < a.batch; ++b)
      segments.push_back({b, 0, a.query_len, 0, open_end(b), a.key_len, a.lower_right ? a.key_len - a.query_len : 0});
    return segments;
  }
  const auto* query_offsets = static_cast<const int32_t*>(run.inputs[sdpa_query_offsets]);
  const auto* key_offsets = static_cast<const int32_t*>(run.inputs[sdpa_key_offsets]);
  // Positions before the first offset and after the last belong to no sequence: segments that see nothing. Offsets that
  // fall or leave the tensor are clipped, so that no memory outside is touched.
  int64_t query = 0, key = 0;
  for (int64_t s = 0; s <= a.sequences + 1; ++s) {
    const bool last = s > a.sequences;
    const int64_t next_query = last ? a.query_len : std::clamp<int64_t>(query_offsets[s * a.query_offsets_stride], query, a.query_len);
    const int64_t next_key = last ? a.key_len : std::clamp<int64_t>(key_offsets[s * a.key_offsets_stride], key, a.key_len);
    AttentionSegment segment{0, query, next_query - query, key, 0, next_key - key, 0};
    if (s > 0 && !last) {
      segment.key_count = std::clamp<int64_t>(open_end(0) - key, 0, segment.key_total);
      segment.shift = a.lower_right ? segment.key_total - segment.query_count : 0;
    }
    if (segment.query_count > 0 || segment.key_total > 0) segments.push_back(segment);
    query = next_query;
    key = next_key;
  }
  return segments;
}

std::optional<Refusal> attention_refusal(const SdpaCall& call) {
  const auto bad_dtype = [](DType dtype) { return dtype != DType::f32 && !is_half(dtype); };
  const std::pair<const char*, const TensorType*> tensors[] = {{"query", &call.query}, {"key", &call.key}, {"value", &call.value}};
  for (const auto& [name, type] : tensors) {
    if (type->device.kind != DeviceKind::cpu)
      return refuse(RefusalCode::wrong_device, std::string(name) + " is on " + to_string(type->device) + ", the cpu kernels need cpu");
    if (bad_dtype(type->dtype))
      return refuse(RefusalCode::wrong_dtype, std::string(name) + " is " + std::string(dtype_name(type->dtype)) + ", the cpu kernels take f32, bf16 and f16");
  }
  if (call.mask && call.mask->dtype != DType::boolean && bad_dtype(call.mask->dtype))
    return refuse(RefusalCode::wrong_dtype, "mask is " + std::string(dtype_name(call.mask->dtype)) + ", the cpu kernels take bool, f32, bf16 and f16");
  constexpr int64_t longest = (int64_t{1} << 31) - 1024;  // positions are 32-bit in vectors
  if (call.query_len() > longest || call.key_len() > longest)
    return refuse(RefusalCode::too_large, "lengths are " + std::to_string(call.query_len()) + " and " + std::to_string(call.key_len()) +
                                              ", the cpu kernels take at most " + std::to_string(longest));
  constexpr int64_t widest = 65536;  // scratch grows with it
  if (call.head_dim() > widest || call.value_dim() > widest)
    return refuse(RefusalCode::too_large, "head dims are " + std::to_string(call.head_dim()) + " and " + std::to_string(call.value_dim()) +
                                              ", the cpu kernels take at most " + std::to_string(widest));
  if (call.dropout_p > 0 && !call.seed)
    return refuse(RefusalCode::unsupported_argument, "dropout_p is " + std::to_string(call.dropout_p) + " and there is no seed, the cpu kernels need one");
  if (call.query_offsets.has_value() != call.key_offsets.has_value())
    return refuse(RefusalCode::unsupported_argument, std::string(call.query_offsets ? "key" : "query") + "_offsets are missing, packed sequences need both");
  if (call.query_offsets && call.query_offsets->shape[0] != call.key_offsets->shape[0])
    return refuse(RefusalCode::wrong_shape, "query_offsets has " + std::to_string(call.query_offsets->shape[0]) + " entries, key_offsets " +
                                                std::to_string(call.key_offsets->shape[0]) + "; packed sequences need as many");
  if (call.query_offsets && call.query_offsets->shape[0] < 1)
    return refuse(RefusalCode::wrong_shape, "query_offsets has no entries, packed sequences need at least one");
  return std::nullopt;
}

std::unique_ptr<Kernel> make_attention_forward(const SdpaCall& call, const TensorType& out, const TensorType* lse) {
  AttentionArguments a = arguments_of(call);
  a.out = view_of(out);
  a.has_lse = lse != nullptr;
  return std::make_unique<AttentionForward>(a, kernels_of(chosen_isa(), a.in_bf16));
}

std::unique_ptr<Kernel> make_attention_backward(const SdpaCall& call, const TensorType& out, const TensorType& out_grad,
                                                const SdpaGradientTypes& gradients, int64_t query_gradient_floats) {
  AttentionArguments a = arguments_of(call);
  if (query_gradient_floats > 0) a.query_gradient_floats = query_gradient_floats;
  a.out = view_of(out);
  a.out_grad = view_of(out_grad);
  a.in_bf16 = a.in_bf16 && out_grad.dtype == DType::bf16;
  if (gradients[0]) a.query_grad = view_of(*gradients[0]);
  if (gradients[1]) a.key_grad = view_of(*gradients[1]);
  if (gradients[2]) a.value_grad = view_of(*gradients[2]);
  if (gradients[3]) a.mask_grad = view_of(*gradients[3]);
  a.wants_sink_grad = gradients[4] != nullptr;
  a.wants_slopes_grad = gradients[5] != nullptr;
  if (gradients[4] && gradients[4]->shape[0] > 1) a.sink_grad_stride = gradients[4]->strides[0];
  if (gradients[5] && gradients[5]->shape[0] > 1) a.slopes_grad_stride = gradients[5]->strides[0];
  return std::make_unique<AttentionBackward>(a, kernels_of(chosen_isa(), a.in_bf16));
}

}  // namespace fulmen::cpu
