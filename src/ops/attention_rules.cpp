// Reads an attention call off types and attributes, brings it to four dims, and says what is wrong with it.
#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "ops/attention_rules.h"
#include "ops/axes.h"

namespace fulmen {
namespace {

[[noreturn]] void shape_error(const std::string& message) { throw ShapeError("sdpa: " + message); }
[[noreturn]] void type_error(const std::string& message) { throw TypeError("sdpa: " + message); }

const char* const operand_names[] = {"query", "key", "value", "mask", "sink", "alibi_slopes", "query_offsets", "key_offsets", "key_lengths", "seed"};

Dims leading(const TensorType& type, int count) {
  // All dims before length and head_dim, padded with 1 at the front to `count`.
  Dims dims(type.shape.begin(), type.shape.end() - 2);
  dims.insert(dims.begin(), static_cast<size_t>(count) - dims.size(), 1);
  return dims;
}

// The batch dims, heads and full shape that query, key and value share.
struct Leading {
  int count = 0;   // leading dims of the widest operand, at least 2
  Dims batch;      // broadcast, without the heads dim
  int64_t heads = 0, key_heads = 0;
};

Leading leading_of(const TensorType& query, const TensorType& key, const TensorType& value, bool grouping) {
  Leading result;
  result.count = std::max({query.rank(), key.rank(), value.rank(), 4}) - 2;
  const Dims q = leading(query, result.count), k = leading(key, result.count), v = leading(value, result.count);
  const auto batch = [](const Dims& dims) { return Dims(dims.begin(), dims.end() - 1); };
  const auto shared = [&](const Dims& a, const Dims& b) -> Dims {
    if (auto dims = broadcast_shapes(a, b)) return *dims;
    shape_error("query is " + to_string(query.shape) + ", key is " + to_string(key.shape) + ", value is " + to_string(value.shape) +
                "; their batch dims don't broadcast, needed equal sizes or 1");
  };
  result.batch = shared(shared(batch(q), batch(k)), batch(v));
  const int64_t query_heads = q.back(), key_heads = k.back(), value_heads = v.back();
  const auto heads_text = [](int64_t n) { return std::to_string(n) + (n == 1 ? " head" : " heads"); };
  if (key_heads != value_heads && key_heads != 1 && value_heads != 1)
    shape_error("value has " + heads_text(value_heads) + ", key has " + std::to_string(key_heads) + "; they must be equal");
  result.key_heads = key_heads == 1 ? value_heads : key_heads;  // 0 beside 1 stays 0
  result.heads = query_heads;
  if (result.key_heads == query_heads || result.key_heads == 1) return result;
  if (grouping) {
    if (result.key_heads == 0 || query_heads % result.key_heads)
      shape_error("key has " + heads_text(result.key_heads) + ", query has " + std::to_string(query_heads) +
                  "; query heads must be a multiple of key heads");
    return result;
  }
  if (query_heads == 1) {
    result.heads = result.key_heads;
    return result;
  }
  const bool groups = result.key_heads > 0 && query_heads % result.key_heads == 0;
  shape_error("key has " + heads_text(result.key_heads) + ", query has " + std::to_string(query_heads) +
              "; they must be equal or 1" + (groups ? ", or enable_gqa set" : ""));
}

// Four dims (batch, heads, rows, columns) of an operand, its batch dims broadcast to `batch` with stride 0.
TensorType four_dims(const TensorType& type, const Leading& lead, int64_t heads) {
  TensorType out = type;
  const auto rank = type.shape.size();
  Dims shape = type.shape, strides = type.strides;
  const size_t pad = static_cast<size_t>(lead.count) + 2 - rank;
  shape.insert(shape.begin(), pad, 1);
  strides.insert(strides.begin(), pad, 0);
  for (size_t i = 0; i < lead.batch.size(); ++i)
    if (shape[i] != lead.batch[i]) strides[i] = 0;
  const auto head_dim = static_cast<size_t>(lead.count) - 1;
  if (shape[head_dim] != heads) strides[head_dim] = 0;
  // Several batch dims become one: the stride of the innermost that isn't 1. Where they don't collapse, the value is
  // copied on its way, and the type here describes the copy.
  int64_t batch = 1, stride = 0;
  bool collapses = true;
  for (size_t i = lead.batch.size(); i-- > 0;) {
    if (lead.batch[i] == 1) continue;
    if (batch == 1)
      stride = strides[i];
    else
      collapses &= strides[i] == stride * batch;
    batch *= lead.batch[i];
  }
  out.shape = {batch, heads, shape[head_dim + 1], shape[head_dim + 2]};
  if (!collapses)
    out.strides = contiguous_strides(out.shape);
  else
    out.strides = {stride, strides[head_dim], strides[head_dim + 1], strides[head_dim + 2]};
  return out;
}

TensorType four_dims_of_mask(const TensorType& mask, const Leading& lead) {
  TensorType out = mask;
  if (mask.rank() > lead.count + 2)
    shape_error("mask is " + to_string(mask.shape) + ", which has more dims than query, key and value; needed " +
                std::to_string(lead.count + 2) + " or fewer");
  const size_t pad = static_cast<size_t>(lead.count + 2 - mask.rank());
  Dims shape = mask.shape, strides = mask.strides;
  shape.insert(shape.begin(), pad, 1);
  strides.insert(strides.begin(), pad, 0);
  int64_t batch = 1, stride = 0;
  bool collapses = true, all_one = true;
  for (size_t i = 0; i < lead.batch.size(); ++i) {
    if (shape[i] != 1 && shape[i] != lead.batch[i])
      shape_error("mask is " + to_string(mask.shape) + ", whose batch dims don't broadcast to " + to_string(lead.batch));
    all_one &= shape[i] == 1;
  }
  if (!all_one)
    for (size_t i = lead.batch.size(); i-- > 0;) {
      if (lead.batch[i] == 1) continue;
      const int64_t own = shape[i] == 1 ? 0 : strides[i];
      if (batch == 1)
        stride = own;
      else
        collapses &= own == stride * batch;
      batch *= lead.batch[i];
    }
  const size_t heads = lead.batch.size();
  out.shape = {batch, shape[heads], shape[heads + 1], shape[heads + 2]};
  out.strides = collapses ? Dims{stride, strides[heads], strides[heads + 1], strides[heads + 2]} : contiguous_strides(out.shape);
  return out;
}

bool flag(const Attributes& attrs, std::string_view name, bool fallback) { return attrs.has(name) ? attrs.get_bool(name) : fallback; }
int64_t integer(const Attributes& attrs, std::string_view name, int64_t fallback) { return attrs.has(name) ? attrs.get_int(name) : fallback; }
double number(const Attributes& attrs, std::string_view name, double fallback) { return attrs.has(name) ? attrs.get_float(name) : fallback; }

}  // namespace

SdpaCall sdpa_call_of(const std::vector<const TensorType*>& types, const Attributes& attrs, bool training) {
  const auto type = [&](size_t i) { return i < types.size() ? types[i] : nullptr; };
  for (size_t i = 0; i < 3; ++i) {
    if (!type(i)) type_error(std::string(operand_names[i]) + " is not given");
    if (type(i)->rank() < 2)
      shape_error(std::string(operand_names[i]) + " has " + std::to_string(type(i)->rank()) + " dims, needed 2 or more: (..., length, head_dim)");
  }
  const Leading lead = leading_of(*type(0), *type(1), *type(2), flag(attrs, "enable_gqa", true));
  SdpaCall call;
  call.query = four_dims(*type(sdpa_query), lead, lead.heads);
  call.key = four_dims(*type(sdpa_key), lead, lead.key_heads);
  call.value = four_dims(*type(sdpa_value), lead, lead.key_heads);
  if (type(sdpa_mask)) call.mask = four_dims_of_mask(*type(sdpa_mask), lead);
  const auto optional = [&](size_t i, std::optional<TensorType>& slot) {
    if (type(i)) slot = *type(i);
  };
  optional(sdpa_sink, call.sink);
  optional(sdpa_alibi_slopes, call.alibi_slopes);
  optional(sdpa_query_offsets, call.query_offsets);
  optional(sdpa_key_offsets, call.key_offsets);
  optional(sdpa_key_lengths, call.key_lengths);
  optional(sdpa_seed, call.seed);
  call.is_causal = flag(attrs, "is_causal", false);
  call.lower_right = flag(attrs, "lower_right", false);
  call.window_left = integer(attrs, "window_left", -1);
  call.window_right = integer(attrs, "window_right", -1);
  call.dropout_p = number(attrs, "dropout_p", 0.0);
  call.softcap = number(attrs, "softcap", 0.0);
  const auto width = static_cast<double>(std::max<int64_t>(call.head_dim(), 1));
  call.scale = number(attrs, "scale", 1.0 / std::sqrt(width));
  call.training = training;
  return call;
}

void check_sdpa_call(const SdpaCall& call) {
  const TensorType* tensors[] = {&call.query, &call.key, &call.value};
  for (size_t i = 0; i < 3; ++i) {
    if (!is_float(tensors[i]->dtype))
      type_error(std::string(operand_names[i]) + " is " + text_of(tensors[i]->dtype) + ", needed a float dtype");
    if (tensors[i]->dtype != call.query.dtype)
      type_error(std::string(operand_names[i]) + " is " + text_of(tensors[i]->dtype) + ", query is " + text_of(call.query.dtype) +
                 "; they must be equal");
  }
  if (call.key.shape[3] != call.head_dim())
    shape_error("key has head_dim " + std::to_string(call.key.shape[3]) + ", query has " + std::to_string(call.head_dim()) + "; they must be equal");
  if (call.value.shape[2] != call.key_len())
    shape_error("value has length " + std::to_string(call.value.shape[2]) + ", key has " + std::to_string(call.key_len()) + "; they must be equal");
  if (call.mask) {
    if (call.is_causal) type_error("mask and is_causal are both given; give one, or put the causal part into the mask");
    if (call.mask->dtype != DType::boolean && !is_float(call.mask->dtype))
      type_error("mask is " + text_of(call.mask->dtype) + ", needed bool (true = open) or a float that is added");
    const Dims full{call.batch(), call.heads(), call.query_len(), call.key_len()};
    for (size_t i = 0; i < 4; ++i)
      if (call.mask->shape[i] != 1 && call.mask->shape[i] != full[i])
        shape_error("mask is " + to_string(call.mask->shape) + ", the scores are " + to_string(full) +
                    " (batch, heads, query_len, key_len); mask must broadcast to them");
  }
  const auto per_head = [&](const std::optional<TensorType>& type, const char* name) {
    if (!type) return;
    if (!is_float(type->dtype)) type_error(std::string(name) + " is " + text_of(type->dtype) + ", needed f32");
    if (type->shape != Dims{call.heads()})
      shape_error(std::string(name) + " is " + to_string(type->shape) + ", needed " + to_string(Dims{call.heads()}) + ", one a query head");
  };
  per_head(call.sink, "sink");
  per_head(call.alibi_slopes, "alibi_slopes");
  const auto integers = [&](const std::optional<TensorType>& type, const char* name) {
    if (type && type->dtype != DType::i32 && type->dtype != DType::i64)
      type_error(std::string(name) + " is " + text_of(type->dtype) + ", needed i32 or i64");
  };
  integers(call.query_offsets, "query_offsets");
  integers(call.key_offsets, "key_offsets");
  integers(call.key_lengths, "key_lengths");
  if (call.query_offsets.has_value() != call.key_offsets.has_value())
    type_error(std::string(call.query_offsets ? "key_offsets" : "query_offsets") + " is not given; packed sequences need both");
  if (call.query_offsets) {
    const Dims &a = call.query_offsets->shape, &b = call.key_offsets->shape;
    if (a.size() != 1 || a[0] < 2 || a != b)
      shape_error("query_offsets is " + to_string(a) + ", key_offsets is " + to_string(b) + "; needed [count + 1] both, count 1 or more");
    if (call.batch() != 1)
      shape_error("query has batch " + std::to_string(call.batch()) + ", packed sequences need batch 1");
  }
  if (call.key_lengths && call.key_lengths->shape != Dims{call.batch()})
    shape_error("key_lengths is " + to_string(call.key_lengths->shape) + ", needed " + to_string(Dims{call.batch()}) + ", one a batch entry");
  if (!(call.dropout_p >= 0.0 && call.dropout_p <= 1.0))
    shape_error("dropout_p is " + to_string(AttrValue(call.dropout_p)) + ", needed a probability from 0 to 1");
  if (call.dropout_p > 0.0 && !call.seed) type_error("dropout_p is " + to_string(AttrValue(call.dropout_p)) + " and seed is not given");
  if (call.seed && (call.seed->dtype != DType::i64 || call.seed->shape != Dims{2}))
    type_error("seed is " + to_string(*call.seed) + ", needed i64[2]");
  if (call.window_left < -1 || call.window_right < -1)
    shape_error("window is " + std::to_string(call.window_left) + " to the left, " + std::to_string(call.window_right) +
                " to the right; needed 0 or more, or -1 for open");
  if (!(call.softcap >= 0.0 && std::isfinite(call.softcap)))
    shape_error("softcap is " + to_string(AttrValue(call.softcap)) + ", needed 0 (none) or a finite number above it");
  if (std::isnan(call.scale)) shape_error("scale is NaN, needed a number");
}

bool is_canonical_sdpa(const std::vector<const TensorType*>& types) {
  for (size_t i = 0; i < 3; ++i)
    if (types[i]->rank() != 4) return false;
  const TensorType &query = *types[0], &key = *types[1], &value = *types[2];
  if (key.shape[0] != query.shape[0] || value.shape[0] != query.shape[0] || key.shape[1] != value.shape[1]) return false;
  if (query.shape[1] == 1 && key.shape[1] != 1) return false;
  const auto is = [&](size_t i, DType dtype) { return i >= types.size() || !types[i] || types[i]->dtype == dtype; };
  if (types.size() > sdpa_mask && types[sdpa_mask] && types[sdpa_mask]->rank() != 4) return false;
  const DType wide = compute_dtype(query.dtype);
  return (is(sdpa_sink, wide) || is(sdpa_sink, DType::f32)) && (is(sdpa_alibi_slopes, wide) || is(sdpa_alibi_slopes, DType::f32)) &&
         is(sdpa_query_offsets, DType::i32) && is(sdpa_key_offsets, DType::i32) && is(sdpa_key_lengths, DType::i32);
}

bool is_canonical_sdpa(const Trace& trace, const Node& node) {
  std::vector<const TensorType*> types;
  for (ValueId id : node.inputs) types.push_back(id == no_value ? nullptr : &trace.type(id));
  return is_canonical_sdpa(types);
}

std::vector<ValueId> bring_to_four_dims(Builder& b, const std::vector<ValueId>& inputs, const Attributes& attrs) {
  const Leading lead = leading_of(b.type(inputs[0]), b.type(inputs[1]), b.type(inputs[2]), flag(attrs, "enable_gqa", true));
  std::vector<ValueId> out = inputs;
  out.resize(sdpa_operand_count, no_value);
  const auto bring = [&](ValueId id, Dims heads_and_rest, const Dims& batch_dims) {
    // Pads with 1, broadcasts batch dims and heads, merges the batch dims.
    const Dims own = b.type(id).shape;
    Dims padded = own;
    padded.insert(padded.begin(), static_cast<size_t>(lead.count) + 2 - own.size(), 1);
    Dims wide = batch_dims;
    wide.insert(wide.end(), heads_and_rest.begin(), heads_and_rest.end());
    id = b.expand(b.reshape(id, padded), wide);
    Dims merged{element_count(batch_dims)};
    merged.insert(merged.end(), heads_and_rest.begin(), heads_and_rest.end());
    return b.reshape(id, merged);
  };
  const int64_t heads[] = {lead.heads, lead.key_heads, lead.key_heads};
  for (size_t i = 0; i < 3; ++i) {
    const Dims shape = b.type(inputs[i]).shape;
    out[i] = bring(inputs[i], {heads[i], shape[shape.size() - 2], shape.back()}, lead.batch);
  }
  if (out[sdpa_mask] != no_value) {
    Dims shape = b.type(inputs[sdpa_mask]).shape;
    shape.insert(shape.begin(), static_cast<size_t>(lead.count) + 2 - shape.size(), 1);
    const Dims mask_batch(shape.begin(), shape.end() - 3);
    const bool all_one = element_count(mask_batch) == 1;
    out[sdpa_mask] = bring(inputs[sdpa_mask], Dims(shape.end() - 3, shape.end()), all_one ? Dims(mask_batch.size(), 1) : lead.batch);
  }
  const DType wide = compute_dtype(b.type(inputs[0]).dtype);
  for (size_t i : {sdpa_sink, sdpa_alibi_slopes})
    if (out[i] != no_value && b.type(out[i]).dtype != wide) out[i] = b.convert(out[i], DType::f32);
  for (size_t i : {sdpa_query_offsets, sdpa_key_offsets, sdpa_key_lengths})
    if (out[i] != no_value) out[i] = b.convert(out[i], DType::i32);
  return out;
}

Dims sdpa_leading_dims(const std::vector<const TensorType*>& types, const Attributes& attrs) {
  const Leading lead = leading_of(*types[0], *types[1], *types[2], flag(attrs, "enable_gqa", true));
  Dims dims = lead.batch;
  dims.push_back(lead.heads);
  // As many dims as the widest operand has.
  const int widest = std::max({types[0]->rank(), types[1]->rank(), types[2]->rank()}) - 2;
  dims.erase(dims.begin(), dims.begin() + (lead.count - widest));
  return dims;
}

}  // namespace fulmen
