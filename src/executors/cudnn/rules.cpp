#include "executors/cudnn/rules.h"

#include <array>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <utility>

namespace fulmen::cudnn {

namespace {

using Sentence = std::optional<std::string>;
using Named = std::pair<const char*, const TensorType*>;

std::string text(int64_t value) { return std::to_string(value); }

std::array<Named, 3> attended(const SdpaCall& call) {
  return {Named{"query", &call.query}, Named{"key", &call.key}, Named{"value", &call.value}};
}

std::array<Named, 10> all_tensors(const SdpaCall& call) {
  const auto given = [](const std::optional<TensorType>& type) { return type ? &*type : nullptr; };
  return {Named{"query", &call.query},
          Named{"key", &call.key},
          Named{"value", &call.value},
          Named{"mask", given(call.mask)},
          Named{"sink", given(call.sink)},
          Named{"alibi_slopes", given(call.alibi_slopes)},
          Named{"query_offsets", given(call.query_offsets)},
          Named{"key_offsets", given(call.key_offsets)},
          Named{"key_lengths", given(call.key_lengths)},
          Named{"seed", given(call.seed)}};
}

Sentence on_a_gpu(const SdpaCall& call, const Target& target) {
  if (target.kind != DeviceKind::cuda) return "sdpa: the target is " + target.name + ", cudnn runs on CUDA devices";
  if (target.described) return std::nullopt;  // the tensors are specs then
  for (const auto& [name, type] : all_tensors(call)) {
    if (!type) continue;
    if (type->device.kind != DeviceKind::cuda)
      return std::string("sdpa: ") + name + " is on " + to_string(type->device) + ", cudnn needs " + target.name;
    if (type->device.index != target.device_index)
      return std::string("sdpa: ") + name + " is on " + to_string(type->device) + ", query's device is " + target.name +
             "; all must be on one";
  }
  return std::nullopt;
}

Sentence new_enough(const SdpaCall&, const Target& target) {
  if (target.compute_capability >= 80) return std::nullopt;
  return "sdpa: " + target.name + " has compute capability " + text(target.compute_capability / 10) + "." +
         text(target.compute_capability % 10) + ", cudnn attention needs 8.0";
}

Sentence four_dims(const SdpaCall& call, const Target&) {
  for (const auto& [name, type] : attended(call))
    if (type->rank() != 4 || type->strides.size() != 4)
      return std::string("sdpa: ") + name + " has " + text(type->rank()) + " dimensions, cudnn needs 4";
  if (call.mask && (call.mask->rank() != 4 || call.mask->strides.size() != 4))
    return "sdpa: mask has " + text(call.mask->rank()) + " dimensions, cudnn needs 4";
  return std::nullopt;
}

Sentence one_dtype(const SdpaCall& call, const Target&) {
  const DType dtype = call.query.dtype;
  for (const auto& [name, type] : attended(call)) {
    if (!is_float(type->dtype) || type->dtype == DType::f64)
      return std::string("sdpa: ") + name + " is " + std::string(dtype_name(type->dtype)) +
             ", cudnn attention takes f16, bf16 and f32";
    if (type->dtype != dtype)
      return std::string("sdpa: ") + name + " is " + std::string(dtype_name(type->dtype)) + ", query is " +
             std::string(dtype_name(dtype)) + "; cudnn needs one dtype";
  }
  if (call.mask && call.mask->dtype != DType::boolean && call.mask->dtype != dtype && call.mask->dtype != DType::f32)
    return "sdpa: mask is " + std::string(dtype_name(call.mask->dtype)) + ", cudnn needs bool, f32 or query's " +
           std::string(dtype_name(dtype));
  return std::nullopt;
}

// A size of 0 divides by zero inside the library.
Sentence no_empty(const SdpaCall& call, const Target&) {
  static constexpr const char* dims[] = {"batch", "heads", "length", "head_dim"};
  for (const auto& [name, type] : attended(call))
    for (int i = 0; i < 4; ++i)
      if (type->shape[static_cast<size_t>(i)] <= 0)
        return std::string("sdpa: ") + name + " has " + dims[i] + " " + text(type->shape[static_cast<size_t>(i)]) +
               ", cudnn needs at least 1";
  if (call.mask)
    for (int64_t size : call.mask->shape)
      if (size <= 0) return "sdpa: mask is " + to_string(call.mask->shape) + ", cudnn needs sizes of at least 1";
  return std::nullopt;
}

Sentence matching_heads(const SdpaCall& call, const Target&) {
  if (call.value.shape[1] != call.key_heads())
    return "sdpa: value has " + text(call.value.shape[1]) + " heads, key has " + text(call.key_heads()) +
           "; cudnn needs them equal";
  if (call.heads() % call.key_heads() != 0)
    return "sdpa: key has " + text(call.key_heads()) + " heads, query has " + text(call.heads()) +
           "; query heads must be a multiple of key heads";
  return std::nullopt;
}

Sentence matching_sizes(const SdpaCall& call, const Target&) {
  for (const auto& [name, type] : attended(call))
    if (type->shape[0] != call.batch())
      return std::string("sdpa: ") + name + " has batch " + text(type->shape[0]) + ", query has " + text(call.batch()) +
             "; cudnn needs them equal";
  if (call.key.shape[3] != call.head_dim())
    return "sdpa: key has head_dim " + text(call.key.shape[3]) + ", query has " + text(call.head_dim());
  if (call.value.shape[2] != call.key_len())
    return "sdpa: value has length " + text(call.value.shape[2]) + ", key has " + text(call.key_len());
  if (!call.mask) return std::nullopt;
  const int64_t full[] = {call.batch(), call.heads(), call.query_len(), call.key_len()};
  for (size_t i = 0; i < 4; ++i)
    if (call.mask->shape[i] != 1 && call.mask->shape[i] != full[i])
      return "sdpa: mask is " + to_string(call.mask->shape) + ", its dimension " + text(static_cast<int64_t>(i)) +
             " must be 1 or " + text(full[i]);
  return std::nullopt;
}

Sentence dims_of_eight(const SdpaCall& call, const Target&) {
  if (call.head_dim() % 8 != 0)
    return "sdpa: head_dim is " + text(call.head_dim()) + ", cudnn needs a multiple of 8";
  if (call.value_dim() % 8 != 0)
    return "sdpa: value's head_dim is " + text(call.value_dim()) + ", cudnn needs a multiple of 8";
  return std::nullopt;
}

// The kernels load 16 bytes at a time and don't check (https://github.com/NVIDIA/cudnn-frontend/issues/1571).
Sentence loadable_strides(const SdpaCall& call, const Target&) {
  for (const auto& [name, type] : attended(call)) {
    const int64_t vector = 16 / static_cast<int64_t>(dtype_bytes(type->dtype));
    if (type->shape[3] > 1 && type->strides[3] != 1)
      return std::string("sdpa: ") + name + " has last stride " + text(type->strides[3]) + ", cudnn needs 1";
    for (size_t i = 0; i < 3; ++i) {
      if (type->shape[i] == 1) continue;
      const int64_t stride = type->strides[i];
      if (stride < 0) return std::string("sdpa: ") + name + " has stride " + text(stride) + ", cudnn needs none below 0";
      if (stride == 0 && (i == 2 || type == &call.query))
        return std::string("sdpa: ") + name + " repeats one row (stride 0 in dimension " + text(static_cast<int64_t>(i)) +
               "), which cudnn isn't trusted with";
      if (stride % vector != 0)
        return std::string("sdpa: ") + name + " has stride " + text(stride) + " in dimension " +
               text(static_cast<int64_t>(i)) + ", cudnn loads 16 bytes at a time and needs a multiple of " + text(vector);
    }
  }
  return std::nullopt;
}

Sentence sensible_dropout(const SdpaCall& call, const Target&) {
  if (!(call.dropout_p >= 0.0 && call.dropout_p < 1.0))
    return "sdpa: dropout_p is " + std::to_string(call.dropout_p) + ", cudnn needs at least 0 and below 1";
  if (call.dropout_p > 0.0 && call.seed && call.seed->dtype != DType::i64)
    return "sdpa: seed is " + std::string(dtype_name(call.seed->dtype)) + ", cudnn is given 64-bit seeds";
  return std::nullopt;
}

Sentence finite_scale(const SdpaCall& call, const Target&) {
  if (std::isfinite(static_cast<float>(call.scale))) return std::nullopt;
  return "sdpa: scale is " + std::to_string(call.scale) + ", cudnn needs a finite f32";
}

// Closed places are -inf before the scale is applied: times 0 or a negative number they are NaN or open. Seen on an
// H200 with 9.19 in every call with such a scale and a closed place, tile tails included.
Sentence positive_scale(const SdpaCall& call, const Target&) {
  if (static_cast<float>(call.scale) > 0.0f) return std::nullopt;
  return "sdpa: scale is " + std::to_string(call.scale) +
         ", cudnn gives NaN unless it is above 0 (benchmarks/results/cudnn_fuzz_h200.txt)";
}

Sentence passed_on(const SdpaCall& call, const Target&) {
  if (call.sink) return "sdpa: sink is given, this executor doesn't pass sinks to cudnn";
  if (call.alibi_slopes) return "sdpa: alibi_slopes are given, cudnn computes slopes of its own";
  if (call.softcap != 0.0) return "sdpa: softcap is " + std::to_string(call.softcap) + ", this executor passes none to cudnn";
  if (call.query_offsets || call.key_offsets)
    return "sdpa: the sequences are packed (query_offsets), cudnn wants the longest length, which the call doesn't tell";
  return std::nullopt;
}

Sentence causal_corner(const SdpaCall& call, const Target&) {
  const bool banded = call.is_causal || call.window_left >= 0 || call.window_right >= 0;
  if (!banded) return std::nullopt;
  if (call.lower_right && call.query_len() > call.key_len())
    return "sdpa: lower_right with query_len " + text(call.query_len()) + " above key_len " + text(call.key_len()) +
           ", cudnn needs at most key_len";
  if (call.lower_right && (call.mask || call.dropout_p > 0.0))
    return std::string("sdpa: lower_right together with ") + (call.mask ? "a mask" : "dropout") +
           ", cudnn takes it alone";
  // Rows without an open key must give zeros; which rows those are is known here for one of these at a time.
  const bool window = call.window_left >= 0 || call.window_right >= 0;
  if (window && (call.mask || call.key_lengths))
    return std::string("sdpa: a window together with ") + (call.mask ? "a mask" : "key_lengths") +
           ", this executor takes one of them";
  if (call.lower_right && call.key_lengths)
    return "sdpa: lower_right together with key_lengths, cudnn would count the corner from each length";
  if (call.window_left >= 0 && call.query_len() > call.key_len())
    return "sdpa: window_left with query_len " + text(call.query_len()) + " above key_len " + text(call.key_len()) +
           ", cudnn needs at most key_len";
  return std::nullopt;
}

Sentence lengths_form(const SdpaCall& call, const Target&) {
  if (call.key_lengths && (call.key_lengths->dtype != DType::i32 || call.key_lengths->rank() != 1 ||
                           call.key_lengths->shape[0] != call.batch()))
    return "sdpa: key_lengths is " + to_string(*call.key_lengths) + ", cudnn needs i32[" + text(call.batch()) + "]";
  if (call.key_lengths && call.mask) return "sdpa: key_lengths together with a mask, this executor takes one of them";
  return std::nullopt;
}

// Offsets inside the kernels are 32 bits wide: public reports of wrong rows and illegal accesses from there on
// (https://github.com/pytorch/pytorch/issues/162588, /150054, /145040).
Sentence offsets_fit(const SdpaCall& call, const Target&) {
  constexpr int64_t limit = std::numeric_limits<int32_t>::max();
  for (const auto& [name, type] : all_tensors(call))
    if (type && span_elements(type->shape, type->strides) > limit)
      return std::string("sdpa: ") + name + " spans " + text(span_elements(type->shape, type->strides)) +
             " elements, cudnn's offsets reach " + text(limit);
  const int64_t out = call.batch() * call.heads() * call.query_len() * call.value_dim();
  if (out > limit) return "sdpa: the result has " + text(out) + " elements, cudnn's offsets reach " + text(limit);
  if (call.mask && call.query_len() * call.key_len() > limit)
    return "sdpa: a mask with query_len * key_len = " + text(call.query_len() * call.key_len()) +
           ", cudnn's offsets reach " + text(limit);
  // A mask row that all queries share is expanded for the backward (known_faults.cpp).
  if (call.training && call.mask && call.query_len() > 1) {
    const auto held = [&](size_t i) {
      return call.mask->strides[i] == 0 && !call.mask->requires_grad ? 1 : call.mask->shape[i];
    };
    if (held(0) * held(1) * call.query_len() * (call.key_len() + 7) > limit)
      return "sdpa: a mask for " + text(held(0)) + " batches, " + text(held(1)) +
             " heads, query_len " + text(call.query_len()) + " and key_len " + text(call.key_len()) +
             ", cudnn's offsets reach " + text(limit) + " elements";
  }
  for (const auto& [name, size] : {std::pair{"batch", call.batch()}, {"heads", call.heads()}})
    if (size > 65535)
      return std::string("sdpa: ") + name + " is " + text(size) + ", a launch grid holds 65535";
  return std::nullopt;
}

constexpr Rule table[] = {
    {"on a GPU", RefusalCode::wrong_device, on_a_gpu},
    {"new enough", RefusalCode::wrong_device, new_enough},
    {"four dims", RefusalCode::wrong_shape, four_dims},
    {"one dtype", RefusalCode::wrong_dtype, one_dtype},
    {"no empty", RefusalCode::degenerate, no_empty},
    {"matching heads", RefusalCode::wrong_shape, matching_heads},
    {"matching sizes", RefusalCode::wrong_shape, matching_sizes},
    {"dims of eight", RefusalCode::wrong_shape, dims_of_eight},
    {"loadable strides", RefusalCode::wrong_layout, loadable_strides},
    {"sensible dropout", RefusalCode::unsupported_argument, sensible_dropout},
    {"finite scale", RefusalCode::unsupported_argument, finite_scale},
    {"positive scale", RefusalCode::known_fault, positive_scale},
    {"passed on", RefusalCode::unsupported_argument, passed_on},
    {"causal corner", RefusalCode::unsupported_argument, causal_corner},
    {"lengths form", RefusalCode::unsupported_argument, lengths_form},
    {"offsets fit", RefusalCode::too_large, offsets_fit},
};

}  // namespace

std::span<const Rule> rules() { return table; }

std::optional<Refusal> apply_rules(const SdpaCall& call, const Target& target) {
  for (const Rule& rule : table)
    if (auto sentence = rule.refuses(call, target)) return Refusal{rule.code, std::move(*sentence)};
  return std::nullopt;
}

}  // namespace fulmen::cudnn
