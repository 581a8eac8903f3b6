// Scaled dot product attention: sdpa, what users call; the pair sdpa_forward and sdpa_backward, what an executor claims
// for training; the bits of attention dropout. One call's meaning and formula: sdpa_call.h; rules: attention_rules.h;
// arithmetic: attention_parts.h.
#include <algorithm>

#include "core/philox.h"
#include "ops/attention_parts.h"
#include "ops/attention_rules.h"
#include "ops/axes.h"
#include "ops/families.h"
#include "ops/sdpa_call.h"

namespace fulmen {
namespace {

std::vector<OperandDef> attention_operands() {
  return {{"query"},
          {"key"},
          {"value"},
          {"mask", Need::optional},
          {"sink", Need::optional},
          {"alibi_slopes", Need::optional},
          {"query_offsets", Need::optional},
          {"key_offsets", Need::optional},
          {"key_lengths", Need::optional},
          {"seed", Need::optional}};
}

std::vector<AttrDef> attention_attributes() {
  return {{"is_causal", AttrKind::boolean, false},     {"lower_right", AttrKind::boolean, false},
          {"window_left", AttrKind::integer, int64_t{-1}}, {"window_right", AttrKind::integer, int64_t{-1}},
          {"dropout_p", AttrKind::number, 0.0},        {"scale", AttrKind::number, std::monostate{}},
          {"softcap", AttrKind::number, 0.0}};
}

std::vector<AttrDef> with(std::vector<AttrDef> attributes, std::initializer_list<AttrDef> more) {
  attributes.insert(attributes.end(), more);
  return attributes;
}

SdpaCall checked_call(const CallTypes& call) {
  const std::vector<const TensorType*> types(call.inputs.begin(), call.inputs.begin() + std::min<ptrdiff_t>(sdpa_operand_count, static_cast<ptrdiff_t>(call.inputs.size())));
  SdpaCall result = sdpa_call_of(types, call.attrs, false);
  check_sdpa_call(result);
  return result;
}

DType lse_dtype(DType query) { return compute_dtype(query); }

std::vector<TensorType> sdpa_shape(const CallTypes& call) {
  const SdpaCall checked = checked_call(call);
  Dims lead = sdpa_leading_dims(call.inputs, call.attrs);
  Dims out = lead, lse = lead;
  out.push_back(checked.query_len());
  out.push_back(checked.value_dim());
  lse.push_back(checked.query_len());
  std::vector<TensorType> types{contiguous_type(checked.query.dtype, out)};
  if (call.attrs.get_bool("return_lse")) types.push_back(contiguous_type(lse_dtype(checked.query.dtype), lse));
  return types;
}

SdpaCall call_of_node(Builder& b, std::span<const ValueId> inputs, const Attributes& attrs) {
  std::vector<const TensorType*> types;
  for (size_t i = 0; i < sdpa_operand_count; ++i) types.push_back(inputs[i] == no_value ? nullptr : &b.trace().type(inputs[i]));
  return sdpa_call_of(types, attrs, true);
}

std::vector<ValueId> sdpa_meaning(Builder& b, const Node& node) {
  const bool return_lse = node.attrs.get_bool("return_lse");
  if (!is_canonical_sdpa(b.trace(), node)) {
    std::vector<const TensorType*> types;
    for (ValueId id : node.inputs) types.push_back(id == no_value ? nullptr : &b.trace().type(id));
    Dims shape = sdpa_leading_dims(types, node.attrs);
    auto results = b.emit("sdpa", bring_to_four_dims(b, node.inputs, node.attrs), node.attrs);
    FULMEN_CHECK(is_canonical_sdpa(b.trace(), b.trace().nodes.back()));  // or this would never end
    const Dims out = b.type(results[0]).shape;
    shape.push_back(out[2]);
    if (return_lse) results[1] = b.reshape(results[1], shape);
    shape.push_back(out[3]);
    results[0] = b.reshape(results[0], shape);
    return results;
  }
  const AttentionResults results = attention_forward(b, call_of_node(b, node.inputs, node.attrs), node.inputs);
  if (return_lse) return {results.out, results.lse};
  return {results.out};
}

std::array<bool, sdpa_gradient_count> needs_of(const Dims& needs) {
  std::array<bool, sdpa_gradient_count> result{};
  for (size_t i = 0; i < needs.size() && i < result.size(); ++i) result[i] = needs[i] != 0;
  return result;
}

std::vector<ValueId> pair_gradient(Builder& b, const GradientArgs& args) {
  Dims needs(sdpa_gradient_count, 0);
  bool any = false;
  for (size_t i = 0; i < sdpa_gradient_count; ++i) {
    needs[i] = args.need[i] && args.inputs[i] != no_value && is_float(b.type(args.inputs[i]).dtype);
    any |= needs[i] != 0;
  }
  std::vector<ValueId> grads(sdpa_operand_count, no_value);
  if (!any) return grads;
  const ValueId out = args.outputs[0], lse = args.outputs[1], lse_grad = args.output_grads[1];
  ValueId out_grad = args.output_grads[0];
  if (lse_grad != no_value) {
    // No executor's backward takes a gradient of the log-sum-exp: the backward is built from plain ops.
    if (out_grad == no_value) out_grad = full_on(b, b.type(out).shape, 0.0, b.type(out).dtype, out);
    const auto parts = attention_backward(b, call_of_node(b, args.inputs, args.node.attrs), args.inputs, out, lse, out_grad, lse_grad, needs_of(needs));
    std::copy(parts.begin(), parts.end(), grads.begin());
    return grads;
  }
  std::vector<ValueId> operands(args.inputs.begin(), args.inputs.begin() + sdpa_operand_count);
  for (ValueId id : {out, lse, out_grad}) operands.push_back(id);
  Attributes attrs = args.node.attrs;
  attrs.set("needs", needs);
  const auto results = b.emit("sdpa_backward", operands, attrs);
  Node& made = b.trace().nodes.back();
  for (size_t i = 0; i < sdpa_gradient_count; ++i) {
    if (needs[i])
      grads[i] = results[i];
    else
      made.outputs[i] = no_value;
  }
  return grads;
}

void need_canonical(const CallTypes& call) {
  std::vector<const TensorType*> types(call.inputs.begin(), call.inputs.begin() + sdpa_operand_count);
  if (!is_canonical_sdpa(types))
    call.shape_error("query is " + to_string(call[0].shape) + ", key is " + to_string(call[1].shape) + ", value is " + to_string(call[2].shape) +
                     "; needed four dims with one batch size, a mask of four dims, f32 sink and slopes, i32 lengths (sdpa brings them there)");
}

// Calls that every form of the op takes; `rest` stands behind the ten operands.
std::vector<Sample> canonical_samples() {
  const Attributes causal{{"is_causal", true}};
  const auto call = [](std::string name, std::string q, std::string k, std::string v, Attributes attrs, std::string mask = "none") {
    return Sample{std::move(name), {std::move(q), std::move(k), std::move(v), std::move(mask)}, std::move(attrs)};
  };
  std::vector<Sample> samples = {
      call("plain", "f32[2,3,5,8]", "f32[2,3,7,8]", "f32[2,3,7,8]", {}),
      call("causal", "f32[1,2,7,4]", "f32[1,2,7,4]", "f32[1,2,7,4]", causal),
      call("causal_wide", "f32[1,1,3,4]", "f32[1,1,5,4]", "f32[1,1,5,4]", causal),
      call("causal_tall", "f32[1,1,5,4]", "f32[1,1,2,4]", "f32[1,1,2,4]", causal),
      call("lower_right", "f32[1,1,3,4]", "f32[1,1,5,4]", "f32[1,1,5,4]", {{"is_causal", true}, {"lower_right", true}}),
      call("lower_right_tall", "f32[1,1,5,4]", "f32[1,1,2,4]", "f32[1,1,2,4]", {{"is_causal", true}, {"lower_right", true}}),
      call("window", "f32[1,2,11,4]", "f32[1,2,11,4]", "f32[1,2,11,4]", {{"window_left", int64_t{2}}, {"window_right", int64_t{1}}}),
      call("value_dim", "f32[1,2,5,8]", "f32[1,2,7,8]", "f32[1,2,7,3]", {}),
      call("one_key_head", "f32[2,4,5,8]", "f32[2,1,7,8]", "f32[2,1,7,8]", {}),
      call("bool_mask", "f32[2,2,5,8]", "f32[2,2,7,8]", "f32[2,2,7,8]", {}, "bool[2,1,5,7]"),
      call("key_mask", "f32[2,2,5,8]", "f32[2,2,7,8]", "f32[2,2,7,8]", {}, "bool[2,1,1,7]"),
      call("added_mask", "f32[2,2,5,8]", "f32[2,2,7,8]", "f32[2,2,7,8]", {}, "f32[1,2,5,7]"),
      call("column_mask", "f32[2,2,5,8]", "f32[2,2,7,8]", "f32[2,2,7,8]", {}, "f32[2,1,5,1]"),
      call("scale", "f32[1,2,5,8]", "f32[1,2,7,8]", "f32[1,2,7,8]", {{"scale", -0.5}}),
      call("scale_zero", "f32[1,2,5,8]", "f32[1,2,7,8]", "f32[1,2,7,8]", {{"scale", 0.0}}),
      call("softcap", "f32[1,2,5,8]", "f32[1,2,7,8]", "f32[1,2,7,8]", {{"softcap", 2.0}, {"is_causal", true}}),
      call("one", "f32[1,1,1,1]", "f32[1,1,1,1]", "f32[1,1,1,1]", {}),
      call("no_queries", "f32[1,2,0,8]", "f32[1,2,7,8]", "f32[1,2,7,8]", {}),
      call("no_keys", "f32[1,2,5,8]", "f32[1,2,0,8]", "f32[1,2,0,8]", {}),
      call("no_batch", "f32[0,2,5,8]", "f32[0,2,7,8]", "f32[0,2,7,8]", {}),
      call("length_major", "f32[2,3,5,8]{stride=120,8,24,1}", "f32[2,3,7,8]{stride=168,8,24,1}", "f32[2,3,7,8]{stride=168,8,24,1}", causal),
      call("expanded_heads", "f32[2,3,5,8]", "f32[2,3,7,8]{stride=56,0,8,1}", "f32[2,3,7,8]{stride=56,0,8,1}", {}),
      call("bf16", "bf16[1,2,17,16]", "bf16[1,2,19,16]", "bf16[1,2,19,16]", {}),
      call("f16", "f16[1,2,9,8]", "f16[1,2,9,8]", "f16[1,2,9,8]", causal),
      call("f64", "f64[1,2,5,4]", "f64[1,2,7,4]", "f64[1,2,7,4]", {}),
  };
  const auto operands = [](Sample sample, size_t at, std::string spec) {
    sample.inputs.resize(sdpa_operand_count, "none");
    sample.inputs[at] = std::move(spec);
    return sample;
  };
  samples.push_back(operands(call("sink", "f32[2,2,5,8]", "f32[2,2,7,8]", "f32[2,2,7,8]", causal), sdpa_sink, "f32[2]"));
  samples.push_back(operands(call("alibi", "f32[2,2,5,8]", "f32[2,2,7,8]", "f32[2,2,7,8]", causal), sdpa_alibi_slopes, "f32[2]"));
  samples.push_back(operands(call("key_lengths", "f32[2,2,5,8]", "f32[2,2,7,8]", "f32[2,2,7,8]", {}), sdpa_key_lengths, "i32[2]"));
  samples.push_back(operands(call("dropout", "f32[2,2,5,8]", "f32[2,2,7,8]", "f32[2,2,7,8]", {{"dropout_p", 0.3}}), sdpa_seed, "i64[2]"));
  samples.push_back(operands(call("dropout_all", "f32[1,2,5,8]", "f32[1,2,7,8]", "f32[1,2,7,8]", {{"dropout_p", 1.0}}), sdpa_seed, "i64[2]"));
  for (Sample& sample : samples) sample.inputs.resize(sdpa_operand_count, "none");
  return samples;
}

Samples sdpa_samples() {
  Samples samples;
  samples.good = canonical_samples();
  const auto good = [&](std::string name, std::vector<std::string> inputs, Attributes attrs = {}) {
    inputs.resize(sdpa_operand_count, "none");
    samples.good.push_back({std::move(name), std::move(inputs), std::move(attrs)});
  };
  good("two_dims", {"f32[5,8]", "f32[7,8]", "f32[7,8]"});
  good("three_dims", {"f32[3,5,8]", "f32[3,7,8]", "f32[3,7,8]", "f32[5,7]"});
  good("five_dims", {"f32[2,2,3,5,4]", "f32[2,1,3,7,4]", "f32[2,1,3,7,4]", "bool[2,1,1,5,7]"});
  good("flat_mask", {"f32[2,2,5,8]", "f32[2,2,7,8]", "f32[2,2,7,8]", "bool[5,7]"});
  good("batch_broadcast", {"f32[2,2,5,8]", "f32[1,2,7,8]", "f32[2,7,8]"});
  good("grouped", {"f32[2,6,5,8]", "f32[2,2,7,8]", "f32[2,2,7,8]"}, {{"enable_gqa", true}});
  good("one_query_head", {"f32[2,1,5,8]", "f32[2,3,7,8]", "f32[2,3,7,8]"});
  good("with_lse", {"f32[2,2,5,8]", "f32[2,2,7,8]", "f32[2,2,7,8]"}, {{"return_lse", true}});
  good("wide_logits", {"f32[2,2,5,8]", "f32[2,2,7,8]", "f32[2,2,7,8]", "none", "f64[2]", "f64[2]"}, {{"is_causal", true}});
  good("lse_of_three_dims", {"f32[2,5,8]", "f32[2,7,8]", "f32[2,7,8]"}, {{"return_lse", true}, {"is_causal", true}});

  const auto bad = [&](std::string name, std::vector<std::string> inputs, Attributes attrs, std::string kind, std::string words) {
    inputs.resize(sdpa_operand_count, "none");
    samples.bad.push_back({{std::move(name), std::move(inputs), std::move(attrs)}, std::move(kind), std::move(words)});
  };
  const std::string q = "f32[2,8,5,8]", k = "f32[2,8,7,8]";
  bad("query_rank", {"f32[8]", "f32[7,8]", "f32[7,8]"}, {}, "ShapeError", "query has 1 dims, needed 2 or more");
  bad("heads", {"f32[1,3,5,7]", "f32[1,4,5,8]", "f32[1,4,5,8]"}, {}, "ShapeError", "sdpa: key has 4 heads, query has 3; they must be equal or 1");
  bad("heads_of_groups", {"f32[1,6,5,8]", "f32[1,4,5,8]", "f32[1,4,5,8]"}, {{"enable_gqa", true}}, "ShapeError",
      "sdpa: key has 4 heads, query has 6; query heads must be a multiple of key heads");
  bad("groups_unasked", {q, "f32[2,2,7,8]", "f32[2,2,7,8]"}, {}, "ShapeError", "or enable_gqa set");
  bad("value_heads", {q, "f32[2,8,7,8]", "f32[2,4,7,8]"}, {}, "ShapeError", "value has 4 heads, key has 8; they must be equal");
  bad("batch", {q, "f32[3,8,7,8]", "f32[3,8,7,8]"}, {}, "ShapeError", "their batch dims don't broadcast");
  bad("head_dim", {q, "f32[2,8,7,16]", k}, {}, "ShapeError", "key has head_dim 16, query has 8; they must be equal");
  bad("value_length", {q, k, "f32[2,8,6,8]"}, {}, "ShapeError", "value has length 6, key has 7; they must be equal");
  bad("dtypes", {q, "bf16[2,8,7,8]", k}, {}, "TypeError", "key is bf16, query is f32; they must be equal");
  bad("integers", {"i64[2,8,5,8]", k, k}, {}, "TypeError", "query is i64, needed a float dtype");
  bad("mask_and_causal", {q, k, k, "bool[5,7]"}, {{"is_causal", true}}, "TypeError", "mask and is_causal are both given");
  bad("mask_shape", {q, k, k, "bool[2,3,5,7]"}, {}, "ShapeError", "mask must broadcast to them");
  bad("mask_dtype", {q, k, k, "i32[5,7]"}, {}, "TypeError", "mask is i32, needed bool");
  bad("mask_rank", {q, k, k, "bool[1,1,1,5,7]"}, {}, "ShapeError", "which has more dims");
  bad("dropout_range", {q, k, k}, {{"dropout_p", 1.5}}, "ShapeError", "dropout_p is 1.5, needed a probability from 0 to 1");
  bad("no_seed", {q, k, k}, {{"dropout_p", 0.1}}, "TypeError", "seed is not given");
  bad("sink_shape", {q, k, k, "none", "f32[4]"}, {}, "ShapeError", "sink is [4], needed [8]");
  bad("offsets_alone", {q, k, k, "none", "none", "none", "i32[3]"}, {}, "TypeError", "key_offsets is not given");
  bad("packed_batch", {q, k, k, "none", "none", "none", "i32[3]", "i32[3]"}, {}, "ShapeError", "packed sequences need batch 1");
  bad("lengths_shape", {q, k, k, "none", "none", "none", "none", "none", "i32[3]"}, {}, "ShapeError", "key_lengths is [3], needed [2]");
  bad("window", {q, k, k}, {{"window_left", int64_t{-3}}}, "ShapeError", "window is -3 to the left");
  bad("softcap", {q, k, k}, {{"softcap", -1.0}}, "ShapeError", "softcap is -1");
  return samples;
}

OpDef sdpa_op() {
  return {
      {.name = "sdpa"},
      /*doc=*/
      "Scaled dot product attention, PyTorch's semantics and more: softmax(query key^T scale + mask) value, with query (..., "
      "query_len, head_dim), key (..., key_len, head_dim), value (..., key_len, value_dim); leading dims broadcast, the last of them "
      "is the heads. Query heads may be a multiple of key heads with enable_gqa; key heads may be 1 always.\n"
      "mask: bool (true = open) or a float that is added; broadcasts to (..., query_len, key_len); not together with is_causal. "
      "is_causal closes keys behind the query, top left aligned; lower_right aligns that corner, and the window, at the last key. "
      "window_left, window_right: keys at most so far away are open. softcap c: c tanh(s / c) of the scaled logits. sink (heads): a "
      "logit without a value in each row's softmax. alibi_slopes (heads): slope -|distance| is added. query_offsets, key_offsets "
      "(count + 1): packed sequences in a batch of 1. key_lengths (batch): keys from there on are closed. dropout_p with seed "
      "i64[2]: attention dropout by Philox.\n"
      "A row with no open key gives 0, and no gradient. Computed in f32 or wider, the result in query's dtype; with return_lse "
      "a second result, the rows' log-sum-exp (-inf for closed rows), f32 or f64.",
      attention_operands(),
      with(attention_attributes(), {{"enable_gqa", AttrKind::boolean, false}, {"return_lse", AttrKind::boolean, false}}),
      /*shape=*/sdpa_shape,
      /*meaning=*/Decomposition{sdpa_meaning},
      /*gradient=*/ByDecomposition{},
      /*autocast=*/Autocast::lower,
      sdpa_samples(),
      /*torch=*/{},
  };
}

OpDef sdpa_forward_op() {
  Samples samples;
  samples.good = canonical_samples();
  samples.good.push_back({"grouped",
                          {"f32[2,6,5,8]", "f32[2,2,7,8]", "f32[2,2,7,8]", "none", "none", "none", "none", "none", "none", "none"},
                          {}});
  samples.bad = {{{"three_dims", {"f32[2,5,8]", "f32[2,7,8]", "f32[2,7,8]"}, {}}, "ShapeError", "needed four dims"}};
  return {
      {.name = "sdpa_forward"},
      /*doc=*/
      "The forward of sdpa's pair: operands of four dims, one batch size, key heads that divide the query heads. Results: out "
      "(batch, heads, query_len, value_dim) in query's dtype, and lse (batch, heads, query_len), f32 or f64, which sdpa_backward reads.",
      attention_operands(),
      attention_attributes(),
      /*shape=*/[](const CallTypes& call) -> std::vector<TensorType> {
        const SdpaCall checked = checked_call(call);
        need_canonical(call);
        return {contiguous_type(checked.query.dtype, {checked.batch(), checked.heads(), checked.query_len(), checked.value_dim()}),
                contiguous_type(lse_dtype(checked.query.dtype), {checked.batch(), checked.heads(), checked.query_len()})};
      },
      /*meaning=*/Decomposition{[](Builder& b, const Node& node) -> std::vector<ValueId> {
        const AttentionResults results = attention_forward(b, call_of_node(b, node.inputs, node.attrs), node.inputs);
        return {results.out, results.lse};
      }},
      /*gradient=*/GradientRule{pair_gradient},
      /*autocast=*/Autocast::keep,
      std::move(samples),
      /*torch=*/{},
  };
}

OpDef sdpa_backward_op() {
  std::vector<OperandDef> operands = attention_operands();
  for (const char* name : {"out", "lse", "out_grad"}) operands.push_back({name});
  return {
      {.name = "sdpa_backward"},
      /*doc=*/
      "The backward of sdpa's pair: sdpa_forward's operands, its results out and lse, and the gradient of out. Results: the "
      "gradients of query, key, value, mask, sink and alibi_slopes in their shapes and dtypes; only those whose entry of `needs` "
      "is 1 are computed. A mask's gradient is summed to the mask's own shape.",
      std::move(operands),
      with(attention_attributes(), {{"needs", AttrKind::dims, Dims{1, 1, 1, 0, 0, 0}}}),
      /*shape=*/[](const CallTypes& call) -> std::vector<TensorType> {
        const SdpaCall checked = checked_call(call);
        need_canonical(call);
        const Dims out{checked.batch(), checked.heads(), checked.query_len(), checked.value_dim()};
        for (size_t i : {sdpa_out, sdpa_out_grad})
          if (call[i].shape != out)
            call.shape_error(operand_name(call.op, i) + " is " + to_string(call[i].shape) + ", needed " + to_string(out));
        const Dims lse(out.begin(), out.end() - 1);
        if (call[sdpa_lse].shape != lse) call.shape_error("lse is " + to_string(call[sdpa_lse].shape) + ", needed " + to_string(lse));
        const Dims& needs = call.attrs.get_dims("needs");
        if (needs.size() != sdpa_gradient_count)
          call.shape_error("needs is " + to_string(needs) + ", needed one entry for each of query, key, value, mask, sink, alibi_slopes");
        std::vector<TensorType> types;
        for (size_t i = 0; i < sdpa_gradient_count; ++i) {
          const bool wanted = needs[i] != 0;
          if (wanted && (!call.has(i) || !is_float(call[i].dtype)))
            call.type_error(operand_name(call.op, i) + (call.has(i) ? " is " + text_of(call[i].dtype) : " is not given") +
                            ", and needs asks for its gradient");
          types.push_back(wanted ? contiguous_type(call[i].dtype, call[i].shape) : contiguous_type(DType::f32, {0}));
        }
        return types;
      },
      /*meaning=*/Decomposition{[](Builder& b, const Node& node) -> std::vector<ValueId> {
        const auto needs = needs_of(node.attrs.get_dims("needs"));
        const auto grads = attention_backward(b, call_of_node(b, node.inputs, node.attrs), node.inputs, node.inputs[sdpa_out],
                                              node.inputs[sdpa_lse], node.inputs[sdpa_out_grad], no_value, needs);
        std::vector<ValueId> results(grads.begin(), grads.end());
        // Results that weren't asked for are empty tensors where the node has them at all.
        for (size_t i = 0; i < results.size(); ++i)
          if (results[i] == no_value && node.outputs[i] != no_value) results[i] = full_on(b, {0}, 0.0, DType::f32, node.inputs[0]);
        return results;
      }},
      /*gradient=*/ByDecomposition{},
      /*autocast=*/Autocast::keep,
      /*samples=*/
      {{{"plain",
         {"f32[2,3,5,8]", "f32[2,3,7,8]", "f32[2,3,7,8]", "none", "none", "none", "none", "none", "none", "none", "f32[2,3,5,8]",
          "f32[2,3,5]", "f32[2,3,5,8]"},
         {}},
        {"query_alone",
         {"f32[1,2,5,8]", "f32[1,2,7,8]", "f32[1,2,7,8]", "none", "none", "none", "none", "none", "none", "none", "f32[1,2,5,8]",
          "f32[1,2,5]", "f32[1,2,5,8]"},
         {{"needs", Dims{1, 0, 0, 0, 0, 0}}}}},
       {{{"out_shape",
          {"f32[2,3,5,8]", "f32[2,3,7,8]", "f32[2,3,7,8]", "none", "none", "none", "none", "none", "none", "none", "f32[2,3,7,8]",
           "f32[2,3,5]", "f32[2,3,5,8]"},
          {}},
         "ShapeError", "out is [2,3,7,8], needed [2,3,5,8]"},
        {{"mask_need",
          {"f32[2,3,5,8]", "f32[2,3,7,8]", "f32[2,3,7,8]", "none", "none", "none", "none", "none", "none", "none", "f32[2,3,5,8]",
           "f32[2,3,5]", "f32[2,3,5,8]"},
          {{"needs", Dims{1, 1, 1, 1, 0, 0}}}},
         "TypeError", "mask is not given, and needs asks for its gradient"}}},
      /*torch=*/{},
  };
}

OpDef attention_dropout_mask_op() {
  return {
      {.name = "attention_dropout_mask"},
      /*doc=*/
      "The bits of attention dropout: bool of shape (batch, heads, query_len, key_len), false with probability p, by the mapping "
      "of attention in core/philox.h, so that kernels draw the same. seed is i64[2]: key and counter offset.",
      /*operands=*/{{"seed"}},
      /*attributes=*/{{"shape", AttrKind::dims, std::nullopt}, {"p", AttrKind::number, std::nullopt}},
      /*shape=*/[](const CallTypes& call) -> std::vector<TensorType> {
        if (call[0].dtype != DType::i64 || call[0].shape != Dims{2}) call.type_error("seed is " + to_string(call[0]) + ", needed i64[2]");
        const Dims& shape = call.attrs.get_dims("shape");
        if (shape.size() != 4 || *std::min_element(shape.begin(), shape.end()) < 0)
          call.shape_error("shape is " + to_string(shape) + ", needed (batch, heads, query_len, key_len)");
        const double p = call.attrs.get_float("p");
        if (!(p >= 0.0 && p <= 1.0)) call.shape_error("p is " + to_string(AttrValue(p)) + ", needed a probability from 0 to 1");
        return {contiguous_type(DType::boolean, shape)};
      },
      /*meaning=*/Primitive{[](const ReferenceArgs& args) {
        const auto key = static_cast<uint64_t>(args.inputs[0]->i[0]), offset = static_cast<uint64_t>(args.inputs[0]->i[1]);
        const Dims& shape = args.attrs.get_dims("shape");
        const uint64_t threshold = dropout_threshold(args.attrs.get_float("p"));
        size_t at = 0;
        for (int64_t line = 0; line < shape[0] * shape[1]; ++line)
          for (int64_t i = 0; i < shape[2]; ++i)
            for (int64_t j = 0; j < shape[3]; ++j)
              args.outputs[0].i[at++] =
                  dropout_keeps(philox_word(key, offset, attention_dropout_row(line, i), static_cast<uint64_t>(j)), threshold);
      }},
      /*gradient=*/NotDifferentiable{"its result is bool"},
      /*autocast=*/Autocast::keep,
      /*samples=*/
      {{{"half", {"i64[2]"}, {{"shape", Dims{2, 3, 5, 67}}, {"p", 0.5}}},
        {"none_dropped", {"i64[2]"}, {{"shape", Dims{1, 1, 3, 4}}, {"p", 0.0}}},
        {"empty", {"i64[2]"}, {{"shape", Dims{1, 1, 0, 4}}, {"p", 0.5}}}},
       {{{"p", {"i64[2]"}, {{"shape", Dims{1, 1, 3, 4}}, {"p", -0.5}}}, "ShapeError", "p is -0.5"},
        {{"shape", {"i64[2]"}, {{"shape", Dims{3, 4}}, {"p", 0.5}}}, "ShapeError", "shape is [3,4]"}}},
      /*torch=*/{},
  };
}

}  // namespace

std::vector<OpDef> attention_ops() {
  std::vector<OpDef> ops;
  for (auto* entry : {sdpa_op, sdpa_forward_op, sdpa_backward_op, attention_dropout_mask_op}) ops.push_back(entry());
  return ops;
}

}  // namespace fulmen
