#include "ops/attention_parts.h"

#include <limits>

#include "ops/axes.h"

namespace fulmen {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

ValueId both(Builder& b, ValueId x, ValueId y) {
  if (x == no_value) return y;
  return y == no_value ? x : b.emit1("logical_and", {x, y});
}

// One call on its way: its sizes, and the values that both directions share.
class Parts {
 public:
  Parts(Builder& b, const SdpaCall& call, std::span<const ValueId> inputs) : b(b), call(call), inputs(inputs) {
    dtype = compute_dtype(call.query.dtype);
    batch = call.batch();
    heads = call.heads();
    rows = call.query_len();
    keys = call.key_len();
    groups = call.key_heads();
    query = wide(inputs[sdpa_query]);
    key = wide(inputs[sdpa_key]);
    value = wide(inputs[sdpa_value]);
  }

  ValueId wide(ValueId id) { return b.convert(id, dtype); }
  ValueId number(double value) { return b.number(value, dtype); }
  // Query heads that share a key head are one block of rows: (batch, key_heads, rows of the group, columns).
  ValueId by_group(ValueId x) {
    const Dims shape = b.type(x).shape;
    if (groups == heads || groups == 0) return x;
    return b.reshape(x, {batch, groups, heads / groups * shape[2], shape[3]});
  }
  ValueId by_head(ValueId x, int64_t columns) { return b.reshape(x, {batch, heads, rows, columns}); }
  ValueId per_head(ValueId x) { return b.reshape(wide(x), {1, heads, 1, 1}); }

  // key position - query position - shift, i64, and whether they belong to one sequence; both broadcast to the scores.
  struct Diagonal {
    ValueId distance = no_value, same = no_value;
  };
  Diagonal diagonal() {
    if (distance_.distance != no_value) return distance_;
    const ValueId i = count_along(b, rows, 4, 2, query), j = count_along(b, keys, 4, 3, query);
    if (inputs[sdpa_query_offsets] == no_value) {
      ValueId d = b.sub(j, i);
      if (call.lower_right && keys != rows) d = b.sub(d, b.number(static_cast<double>(keys - rows), DType::i64));
      distance_ = {d, no_value};
      return distance_;
    }
    const Sequence q = sequence_of(i, inputs[sdpa_query_offsets], {1, 1, rows, 1});
    const Sequence k = sequence_of(j, inputs[sdpa_key_offsets], {1, 1, 1, keys});
    ValueId d = b.sub(b.sub(j, k.begin), b.sub(i, q.begin));
    if (call.lower_right) {
      // The keys of the query's own sequence, looked up by its index.
      const ValueId key_begin = look_up(inputs[sdpa_key_offsets], q.index, {1, 1, rows, 1});
      const ValueId key_end = look_up(inputs[sdpa_key_offsets], b.add(q.index, b.number(1, DType::i64)), {1, 1, rows, 1});
      d = b.sub(d, b.sub(b.sub(key_end, key_begin), b.sub(q.end, q.begin)));
    }
    distance_ = {d, both(b, both(b, q.inside, k.inside), b.emit1("eq", {q.index, k.index}))};
    return distance_;
  }

  // Where a key is open by causality, window, sequences and lengths; no_value if everywhere.
  ValueId open_by_position() {
    ValueId open = no_value;
    const auto limit = [&](const char* comparison, int64_t at) {
      open = both(b, open, b.emit1(comparison, {diagonal().distance, b.number(static_cast<double>(at), DType::i64)}));
    };
    if (call.is_causal) limit("le", 0);
    if (call.window_right >= 0 && !call.is_causal) limit("le", call.window_right);
    if (call.window_left >= 0) limit("ge", -call.window_left);
    if (inputs[sdpa_query_offsets] != no_value) open = both(b, open, diagonal().same);
    if (inputs[sdpa_key_lengths] != no_value) {
      const ValueId lengths = b.reshape(b.convert(inputs[sdpa_key_lengths], DType::i64), {batch, 1, 1, 1});
      open = both(b, open, b.emit1("lt", {count_along(b, keys, 4, 3, query), lengths}));
    }
    return open;
  }

  // The logits, -inf where closed; `capped` is what softcap left, before slopes and mask.
  ValueId scores() {
    ValueId s = by_head(b.matmul(by_group(query), b.transpose(key, 2, 3)), keys);
    s = b.mul(s, number(call.scale));
    if (call.softcap > 0.0) s = capped = b.mul(b.emit1("tanh", {b.mul(s, number(1.0 / call.softcap))}), number(call.softcap));
    if (inputs[sdpa_alibi_slopes] != no_value) s = b.sub(s, b.mul(per_head(inputs[sdpa_alibi_slopes]), distance_size()));
    ValueId open = open_by_position();
    if (const ValueId mask = inputs[sdpa_mask]; mask != no_value) {
      if (b.type(mask).dtype == DType::boolean)
        open = both(b, open, mask);
      else
        s = b.add(s, b.convert(mask, dtype));
    }
    return open == no_value ? s : b.where(open, s, number(-infinity));
  }

  ValueId distance_size() { return b.convert(b.emit1("abs", {diagonal().distance}), dtype); }

  // Dropout of probabilities, or of a gradient on its way to them.
  ValueId dropped(ValueId p) {
    if (call.dropout_p <= 0.0) return p;
    if (keep_ == no_value)
      keep_ = b.emit1("attention_dropout_mask", {inputs[sdpa_seed]}, {{"shape", Dims{batch, heads, rows, keys}}, {"p", call.dropout_p}});
    const double factor = call.dropout_p < 1.0 ? 1.0 / (1.0 - call.dropout_p) : 0.0;
    return b.where(keep_, b.mul(p, number(factor)), number(0.0));
  }

  Builder& b;
  const SdpaCall& call;
  std::span<const ValueId> inputs;
  DType dtype;
  int64_t batch, heads, rows, keys, groups;
  ValueId query, key, value;
  ValueId capped = no_value;

 private:
  struct Sequence {
    ValueId index, inside, begin, end;  // i64 of the position's shape, inside is bool
  };

  ValueId look_up(ValueId offsets, ValueId index, const Dims& shape) {
    const int64_t count = b.type(offsets).shape[0];
    const ValueId table = b.reshape(b.convert(offsets, DType::i64), {count, 1});
    return b.reshape(b.emit1("embedding", {table, index}), shape);
  }

  // The sequence of each position: how many offsets are at or before it, minus one.
  Sequence sequence_of(ValueId position, ValueId offsets, const Dims& shape) {
    const int64_t count = b.type(offsets).shape[0];
    const ValueId line = b.reshape(b.convert(offsets, DType::i64), {1, count});
    const ValueId flat = b.reshape(position, {element_count(shape), 1});
    const ValueId passed = b.reshape(b.sum(b.convert(b.emit1("le", {line, flat}), DType::i64), {1}, false), shape);
    const ValueId zero = b.number(0, DType::i64), one = b.number(1, DType::i64), last = b.number(static_cast<double>(count - 2), DType::i64);
    Sequence s;
    s.inside = both(b, b.emit1("ge", {passed, one}), b.emit1("lt", {passed, b.number(static_cast<double>(count), DType::i64)}));
    s.index = b.emit1("minimum", {b.emit1("maximum", {b.sub(passed, one), zero}), last});
    s.begin = look_up(offsets, s.index, shape);
    s.end = look_up(offsets, b.add(s.index, one), shape);
    return s;
  }

  Diagonal distance_;
  ValueId keep_ = no_value;
};

}  // namespace

AttentionResults attention_forward(Builder& b, const SdpaCall& call, std::span<const ValueId> inputs) {
  Parts parts(b, call, inputs);
  const DType dtype = parts.dtype;
  const Dims lines{parts.batch, parts.heads, parts.rows, 1};
  const ValueId s = parts.scores(), zero = parts.number(0.0), one = parts.number(1.0);
  // The shift by the maximum cancels out of the result, so no gradient flows through it.
  ValueId top = no_value;
  if (parts.keys > 0) top = b.amax(b.emit1("detach", {s}), {3}, true);
  // A row with no open key, whatever its sink.
  const ValueId closed = top != no_value ? b.emit1("eq", {top, parts.number(-infinity)}) : full_on(b, lines, 1.0, DType::boolean, parts.query);
  ValueId sink = no_value;
  if (inputs[sdpa_sink] != no_value) {
    sink = parts.per_head(inputs[sdpa_sink]);
    const ValueId fixed = b.emit1("detach", {sink});
    top = top == no_value ? b.expand(fixed, lines) : b.emit1("maximum", {top, fixed});
  }
  if (top == no_value) top = full_on(b, lines, 0.0, dtype, parts.query);
  top = b.where(b.emit1("isinf", {top}), zero, top);
  const ValueId powers = b.exp(b.sub(s, top));
  ValueId total = b.sum(powers, {3}, true);
  if (sink != no_value) total = b.add(total, b.exp(b.sub(sink, top)));
  const ValueId safe = b.where(closed, one, total);
  const ValueId p = parts.dropped(b.div(powers, safe));
  const ValueId out = parts.by_head(b.matmul(parts.by_group(p), parts.value), call.value_dim());
  const ValueId lse = b.where(closed, parts.number(-infinity), b.add(b.log(safe), top));
  return {b.convert(out, call.query.dtype), b.reshape(lse, {parts.batch, parts.heads, parts.rows})};
}

std::array<ValueId, sdpa_gradient_count> attention_backward(Builder& b, const SdpaCall& call, std::span<const ValueId> inputs,
                                                            ValueId out, ValueId lse, ValueId out_grad, ValueId lse_grad,
                                                            const std::array<bool, sdpa_gradient_count>& needs) {
  Parts parts(b, call, inputs);
  const Dims lines{parts.batch, parts.heads, parts.rows, 1};
  std::array<ValueId, sdpa_gradient_count> grads;
  grads.fill(no_value);
  const ValueId zero = parts.number(0.0);
  lse = b.reshape(parts.wide(lse), lines);
  out_grad = parts.wide(out_grad);
  // A closed row has only -inf among its scores: with 0 in place of its lse, p is 0.
  const ValueId p = b.exp(b.sub(parts.scores(), b.where(b.emit1("isinf", {lse}), zero, lse)));
  const auto as = [&](ValueId grad, SdpaOperand operand) { return b.convert(grad, b.type(inputs[operand]).dtype); };
  if (needs[2])
    grads[2] = as(b.matmul(b.transpose(parts.by_group(parts.dropped(p)), 2, 3), parts.by_group(out_grad)), sdpa_value);
  if (!needs[0] && !needs[1] && !needs[3] && !needs[4] && !needs[5]) return grads;

  ValueId delta = b.neg(b.sum(b.mul(out_grad, parts.wide(out)), {3}, true));
  if (lse_grad != no_value) delta = b.add(delta, b.reshape(parts.wide(lse_grad), lines));
  if (needs[4]) {
    const ValueId sink = parts.per_head(inputs[sdpa_sink]);
    const ValueId share = b.exp(b.sub(sink, b.where(b.emit1("isinf", {lse}), parts.number(infinity), lse)));
    grads[4] = as(b.sum(b.mul(share, delta), {0, 2, 3}, false), sdpa_sink);
  }
  const ValueId dp = parts.dropped(parts.by_head(b.matmul(parts.by_group(out_grad), b.transpose(parts.value, 2, 3)), parts.keys));
  ValueId ds = b.mul(p, b.add(dp, delta));
  if (needs[3]) {
    const TensorType& mask = b.type(inputs[sdpa_mask]);
    grads[3] = b.sum_to(ds, mask.shape, mask.dtype);
  }
  if (needs[5]) grads[5] = as(b.neg(b.sum(b.mul(ds, parts.distance_size()), {0, 2, 3}, false)), sdpa_alibi_slopes);
  if (!needs[0] && !needs[1]) return grads;
  if (call.softcap > 0.0) {
    const ValueId ratio = b.mul(parts.capped, parts.number(1.0 / call.softcap));
    ds = b.mul(ds, b.sub(parts.number(1.0), b.mul(ratio, ratio)));
  }
  ds = parts.by_group(b.mul(ds, parts.number(call.scale)));
  if (needs[0]) grads[0] = as(parts.by_head(b.matmul(ds, parts.key), call.head_dim()), sdpa_query);
  if (needs[1]) grads[1] = as(b.matmul(b.transpose(ds, 2, 3), parts.by_group(parts.query)), sdpa_key);
  return grads;
}

}  // namespace fulmen
