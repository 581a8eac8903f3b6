#include "tests/fuzz/attention_call.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <sstream>

#include "core/error.h"
#include "ops/reference_loops.h"
#include "ops/table.h"

namespace fulmen::fuzz {
namespace {

constexpr const char* names[sdpa_operand_count] = {"query", "key", "value", "mask", "sink", "alibi_slopes", "query_offsets", "key_offsets", "key_lengths", "seed"};
constexpr const char* runners[] = {"kernels", "decomposition", "reference"};

class Drawing {
 public:
  explicit Drawing(uint64_t seed) : rng_(seed * 0x9e3779b97f4a7c15u + 1) {}

  AttentionCall call() {
    AttentionCall c;
    c.values = rng_();
    c.style = chance(2) ? 0 : static_cast<int>(below(9));
    const auto runner = below(12);
    c.runner = c.style == 8 ? Runner::kernels : runner == 0 ? Runner::reference : runner <= 2 ? Runner::decomposition : Runner::kernels;
    const auto& isas = cpu::available_isas();
    c.isa = chance(2) ? isas.front() : isas[below(isas.size())];
    c.threads = chance(8) ? 3 : 1;
    const DType dtype = chance(3) ? DType::bf16 : chance(5) ? DType::f16 : c.style != 8 && chance(9) ? DType::f64 : DType::f32;
    const bool packed = chance(7), small = c.runner == Runner::reference;
    const int lead = packed ? 2 : pick({0, 1, 2, 2, 2, 2, 2, 3});
    const int64_t key_heads = lead == 0 ? 1 : pick({1, 1, 2, 3}), group = lead == 0 ? 1 : pick({1, 1, 1, 2, 3});
    const int64_t most = small ? 6 : chance(6) ? 90 : 14;
    const int64_t query_len = length(most), key_len = chance(3) ? query_len : length(most);
    const int64_t head_dim = chance(25) ? 0 : pick({1, 2, 3, 4, 7, 8, 8, 12, 16, 16, 20, 32, 33}), value_dim = chance(2) ? head_dim : pick({0, 1, 2, 5, 8, 16, 17, 24});
    Dims batch;
    for (int d = 0; d + 1 < lead; ++d) batch.push_back(packed ? 1 : chance(20) ? 0 : pick({1, 2, 3}));
    const auto shape = [&](int64_t heads, int64_t rows, int64_t columns, bool may_broadcast) {
      Dims dims = batch;
      for (int64_t& size : dims)
        if (may_broadcast && chance(6)) size = 1;
      if (lead > 0) dims.push_back(heads);
      while (may_broadcast && dims.size() > 0 && dims.front() == 1 && lead > 1 && chance(4)) dims.erase(dims.begin());
      dims.push_back(rows);
      dims.push_back(columns);
      return dims;
    };
    // Groups of heads, or one side's single head broadcast.
    const bool one_query_head = lead > 0 && group == 1 && key_heads > 1 && chance(10);
    const int64_t heads = one_query_head ? 1 : key_heads * group;
    if (heads > key_heads && key_heads != 1) c.attrs.set("enable_gqa", true);
    const Dims key_shape = shape(key_heads, key_len, head_dim, true);
    put(c, sdpa_query, layout(dtype, shape(heads, query_len, head_dim, false)));
    put(c, sdpa_key, layout(dtype, key_shape));
    put(c, sdpa_value, layout(dtype, shape(lead > 0 && chance(10) ? 1 : key_heads, key_len, value_dim, true)));
    const int64_t result_heads = std::max(heads, key_heads);
    if (chance(4)) c.attrs.set("lower_right", true);
    if (chance(5)) c.attrs.set("window_left", int64_t(below(10)));
    if (chance(5)) c.attrs.set("window_right", int64_t(below(10)));
    if (chance(6)) c.attrs.set("softcap", pick_number({0.5, 1.5, 30.0}));
    if (chance(3)) c.attrs.set("scale", pick_number({0.0, -0.3, 0.7, 1.0, 3.0}));
    if (c.style != 8 && chance(5)) c.attrs.set("return_lse", true);  // lse's gradient comes from the decomposition, where 0 NaN is NaN
    if (chance(3)) {
      Dims mask{chance(2) ? 1 : query_len, chance(4) ? 1 : key_len};
      if (lead > 0 && chance(2)) {
        mask.insert(mask.begin(), chance(2) ? 1 : result_heads);
        if (chance(2)) {
          Dims front = batch;
          for (int64_t& size : front)
            if (chance(2)) size = 1;
          mask.insert(mask.begin(), front.begin(), front.end());
        }
      }
      put(c, sdpa_mask, layout(chance(2) ? DType::boolean : chance(2) ? dtype : DType::f32, mask));
    } else if (chance(2)) {
      c.attrs.set("is_causal", true);
    }
    int64_t batch_size = 1;
    for (int64_t size : batch) batch_size *= size;
    const int64_t own_heads = lead > 0 ? result_heads : 1;
    if (chance(7)) put(c, sdpa_sink, layout(chance(4) ? DType::bf16 : DType::f32, {own_heads}));
    if (chance(7)) put(c, sdpa_alibi_slopes, contiguous_type(DType::f32, {own_heads}));
    if (packed) {
      const int64_t count = 1 + static_cast<int64_t>(below(4));
      const DType integer = chance(4) ? DType::i64 : DType::i32;
      put(c, sdpa_query_offsets, contiguous_type(integer, {count + 1}));
      put(c, sdpa_key_offsets, contiguous_type(integer, {count + 1}));
    }
    if (chance(7)) put(c, sdpa_key_lengths, layout(chance(4) ? DType::i64 : DType::i32, {batch_size}));
    if (chance(6)) {
      c.attrs.set("dropout_p", chance(6) ? 1.0 : 0.4);
      put(c, sdpa_seed, contiguous_type(DType::i64, {2}));
    }
    if (!chance(4))
      for (auto& type : c.types)
        if (type && is_float(type->dtype)) type->requires_grad = !chance(6);
    return c;
  }

 private:
  uint64_t below(uint64_t n) { return rng_() % n; }
  bool chance(uint64_t one_in) { return below(one_in) == 0; }
  int64_t pick(std::initializer_list<int64_t> values) { return values.begin()[below(values.size())]; }
  double pick_number(std::initializer_list<double> values) { return values.begin()[below(values.size())]; }
  int64_t length(int64_t most) { return chance(20) ? 0 : chance(6) ? 1 : 1 + static_cast<int64_t>(below(static_cast<uint64_t>(most))); }

  // Dims in another order in memory, gaps, broadcast dims, steps, strides of size-1 dims that mean nothing.
  TensorType layout(DType dtype, const Dims& shape) {
    TensorType type = contiguous_type(dtype, shape);
    if (chance(2)) return type;
    std::vector<size_t> order(shape.size());
    for (size_t d = 0; d < order.size(); ++d) order[d] = d;
    if (chance(2)) std::shuffle(order.begin(), order.end() - (chance(4) ? 0 : 1), rng_);
    int64_t step = chance(8) ? 2 : 1;
    for (size_t o = order.size(); o-- > 0;) {
      type.strides[order[o]] = step;
      step *= std::max<int64_t>(shape[order[o]], 1);
      if (chance(4)) step += static_cast<int64_t>(below(5));
    }
    for (size_t d = 0; d < shape.size(); ++d)
      if (shape[d] == 1 && chance(3)) type.strides[d] = static_cast<int64_t>(below(1000));
    if (chance(5)) type.strides[below(shape.size())] = 0;
    return type;
  }
  void put(AttentionCall& c, SdpaOperand operand, TensorType type) { c.types[operand] = std::move(type); }

  std::mt19937_64 rng_;
};

}  // namespace

AttentionCall draw_call(uint64_t seed) { return Drawing(seed).call(); }

std::string to_text(const AttentionCall& call) {
  std::string text = std::string("runner=") + runners[static_cast<int>(call.runner)] + " isa=" + std::string(cpu::isa_name(call.isa)) +
                     " threads=" + std::to_string(call.threads) + " style=" + std::to_string(call.style) + " values=" + std::to_string(call.values);
  for (size_t i = 0; i < sdpa_operand_count; ++i)
    if (call.types[i]) text += std::string(" ") + names[i] + "=" + to_string(*call.types[i]);
  for (const auto& [name, value] : call.attrs) text += " " + name + "=" + to_string(value);
  return text;
}

AttentionCall parse_call(const std::string& text) {
  AttentionCall call;
  std::istringstream words(text);
  for (std::string word; words >> word;) {
    const size_t equals = word.find('=');
    if (equals == std::string::npos) throw ShapeError("attention call: '" + word + "' is no name=value");
    const std::string name = word.substr(0, equals), value = word.substr(equals + 1);
    const auto operand = std::find(std::begin(names), std::end(names), name);
    if (operand != std::end(names)) {
      call.types[static_cast<size_t>(operand - names)] = parse_tensor_spec(value);
    } else if (name == "runner") {
      call.runner = static_cast<Runner>(std::find(std::begin(runners), std::end(runners) - 1, value) - runners);
    } else if (name == "isa") {
      for (cpu::Isa isa : cpu::available_isas())
        if (cpu::isa_name(isa) == value) call.isa = isa;
    } else if (name == "threads") {
      call.threads = std::stoi(value);
    } else if (name == "style") {
      call.style = std::stoi(value);
    } else if (name == "values") {
      call.values = std::stoull(value);
    } else {
      for (const AttrDef& attr : require_op("sdpa").attributes) {
        if (attr.name != name) continue;
        if (attr.kind == AttrKind::boolean) call.attrs.set(name, value == "true");
        else if (attr.kind == AttrKind::integer) call.attrs.set(name, static_cast<int64_t>(std::stoll(value)));
        else call.attrs.set(name, std::stod(value));
      }
    }
  }
  return call;
}

std::vector<AttentionCall> simpler_calls(const AttentionCall& call) {
  std::vector<AttentionCall> calls;
  const auto with = [&](auto&& change) {
    AttentionCall simpler = call;
    change(simpler);
    if (to_text(simpler) != to_text(call)) calls.push_back(std::move(simpler));
  };
  for (size_t i = sdpa_mask; i < sdpa_seed; ++i)
    with([&](AttentionCall& c) {
      c.types[i].reset();
      if (i == sdpa_query_offsets || i == sdpa_key_offsets) c.types[sdpa_query_offsets].reset(), c.types[sdpa_key_offsets].reset();
    });
  with([](AttentionCall& c) { c.types[sdpa_seed].reset(), c.attrs.erase("dropout_p"); });
  for (const auto& [name, value] : call.attrs)
    if (name != "dropout_p" && name != "enable_gqa") with([&, n = name](AttentionCall& c) { c.attrs.erase(n); });
  // A length or dim, wherever it appears.
  std::vector<int64_t> sizes;
  for (const auto& type : call.types)
    if (type) sizes.insert(sizes.end(), type->shape.begin(), type->shape.end());
  std::sort(sizes.begin(), sizes.end());
  sizes.erase(std::unique(sizes.begin(), sizes.end()), sizes.end());
  for (size_t n = sizes.size(); n-- > 0;)
    for (int64_t smaller : {int64_t{1}, sizes[n] / 2, sizes[n] - 1})
      if (sizes[n] > 1 && smaller > 0)
        with([&](AttentionCall& c) {
          for (size_t i = 0; i < sdpa_operand_count; ++i)
            if (c.types[i] && i != sdpa_seed) {
              for (int64_t& size : c.types[i]->shape)
                if (size == sizes[n]) size = smaller;
              c.types[i]->strides = contiguous_strides(c.types[i]->shape);
            }
        });
  for (size_t i = 0; i < 3; ++i)
    for (size_t d = 0; d < call.types[i]->shape.size(); ++d)
      with([&](AttentionCall& c) {
        c.types[i]->shape[d] = 1;
        c.types[i]->strides = contiguous_strides(c.types[i]->shape);
      });
  for (size_t i = 0; i < sdpa_operand_count; ++i) {
    if (!call.types[i]) continue;
    with([&](AttentionCall& c) { c.types[i]->requires_grad = false; });
    with([&](AttentionCall& c) { c.types[i]->strides = contiguous_strides(c.types[i]->shape); });
  }
  with([](AttentionCall& c) { c.style = 0; });
  with([](AttentionCall& c) { c.threads = 1; });
  with([](AttentionCall& c) { c.isa = cpu::Isa::generic; });
  with([](AttentionCall& c) {
    for (auto& type : c.types)
      if (type && is_float(type->dtype)) type->dtype = DType::f32;
  });
  return calls;
}

// Styles: 0 normal; 1 small; 2 logits of hundreds to thousands; 3 one channel that sets all logits far below zero;
// 4 masks of -inf and the lowest finite number; 5 tiny output gradients; 6 equal values; 7 large values; 8 keys and values
// that are NaN or infinite.
AttentionValues operand_values(const AttentionCall& call, const TensorType& out, const TensorType* lse) {
  std::mt19937_64 rng(call.values);
  std::normal_distribution<double> normal;
  const auto filled = [&](const TensorType& type, double spread) {
    HostTensor host = make_host(type);
    for (double& x : host.f) x = round_float(normal(rng) * spread, type.dtype);
    return host;
  };
  AttentionValues v;
  const double score_spread = call.style == 1 ? 1e-3 : call.style == 2 ? 15.0 : 1.0;
  const double value_spread = call.style == 1 ? 1e-3 : call.style == 7 ? 60.0 : 1.0;
  v.operands[sdpa_query] = filled(call.query(), score_spread);
  v.operands[sdpa_key] = filled(call.key(), score_spread);
  v.operands[sdpa_value] = filled(call.value(), value_spread);
  const auto channel = [](HostTensor& host, double value) {
    const auto columns = static_cast<size_t>(host.type.shape.back());
    for (size_t k = 0; columns > 0 && k < host.f.size(); k += columns) host.f[k] = value;
  };
  if (call.style == 3) {
    channel(v.operands[sdpa_query], 1.0);
    channel(v.operands[sdpa_key], -480.0);
  }
  if (call.style == 8)
    for (SdpaOperand operand : {sdpa_key, sdpa_value}) {
      HostTensor& host = v.operands[operand];
      const auto columns = static_cast<size_t>(host.type.shape.back());
      for (size_t k = 0; columns > 0 && k < host.f.size(); k += columns)
        if (const uint64_t kind = rng() % 12; kind < 3) {
          const double bad = kind == 0 ? std::numeric_limits<double>::quiet_NaN() : kind == 1 ? std::numeric_limits<double>::infinity() : -std::numeric_limits<double>::infinity();
          std::fill_n(host.f.begin() + static_cast<std::ptrdiff_t>(k), columns, bad);
        }
    }
  if (call.style == 6)
    for (size_t i = 0; i < 3; ++i)
      for (double& x : v.operands[i].f) x = round_float(0.7, call.types[i]->dtype);
  if (call.types[sdpa_mask]) {
    const TensorType& type = *call.types[sdpa_mask];
    HostTensor& mask = v.operands[sdpa_mask] = filled(type, 1.0);
    const uint64_t density = rng() % 5;
    for (int64_t& x : mask.i) x = density == 4 || rng() % 4 < density;
    const double lowest = type.dtype == DType::f16 ? -65504.0 : type.dtype == DType::bf16 ? -3.3895313892515355e38 : type.dtype == DType::f64 ? -1e300 : -3.4028234663852886e38;
    const double low = rng() % 2 ? -std::numeric_limits<double>::infinity() : rng() % 2 ? lowest : std::max(lowest, -1e9);
    if (call.style == 4)
      for (double& x : mask.f)
        if (rng() % 2) x = round_float(low, type.dtype);
    // Whole rows closed, now and then.
    const auto columns = static_cast<size_t>(type.shape.back());
    if (columns > 0 && rng() % 3 == 0)
      for (size_t k = 0; k < std::max(mask.f.size(), mask.i.size()); ++k)
        if (k / columns % 3 == 1) {
          if (mask.i.empty()) {
            if (call.style == 4) mask.f[k] = round_float(low, type.dtype);
          } else {
            mask.i[k] = 0;
          }
        }
  }
  if (call.types[sdpa_sink]) v.operands[sdpa_sink] = filled(*call.types[sdpa_sink], 1.0);
  if (call.types[sdpa_alibi_slopes]) {
    v.operands[sdpa_alibi_slopes] = filled(*call.types[sdpa_alibi_slopes], 0.05);
  }
  const auto integers = [&](SdpaOperand operand, int64_t most, bool sorted) {
    if (!call.types[operand]) return;
    HostTensor& host = v.operands[operand] = make_host(*call.types[operand]);
    for (int64_t& x : host.i) x = static_cast<int64_t>(rng() % static_cast<uint64_t>(most + 1));
    if (!sorted) return;
    std::sort(host.i.begin(), host.i.end());
    if (rng() % 2) host.i.front() = 0, host.i.back() = most;
  };
  const auto length = [](const TensorType& type) { return type.shape[type.shape.size() - 2]; };
  integers(sdpa_query_offsets, length(call.query()), true);
  integers(sdpa_key_offsets, length(call.key()), true);
  integers(sdpa_key_lengths, length(call.key()) + 1, false);
  if (call.types[sdpa_seed]) {
    v.operands[sdpa_seed] = make_host(*call.types[sdpa_seed]);
    v.operands[sdpa_seed].i = {static_cast<int64_t>(rng()), static_cast<int64_t>(rng() % 1000 * 16)};
  }
  // Elements that share memory are one number.
  for (size_t i = 0; i < sdpa_operand_count; ++i) {
    if (!call.types[i]) continue;
    const TensorType& type = *call.types[i];
    bool shared = false;
    for (size_t d = 0; d < type.shape.size(); ++d) shared |= type.shape[d] > 1 && type.strides[d] == 0;
    if (!shared) continue;
    HostTensor& host = v.operands[i];
    const Dims own = contiguous_strides(type.shape);
    for_each_index(type.shape, [&](const Dims& index, int64_t linear) {
      int64_t first = 0;
      for (size_t d = 0; d < index.size(); ++d)
        if (type.strides[d] != 0) first += index[d] * own[d];
      if (host.i.empty()) host.f[static_cast<size_t>(linear)] = host.f[static_cast<size_t>(first)];
      else host.i[static_cast<size_t>(linear)] = host.i[static_cast<size_t>(first)];
    });
  }
  v.out_grad = filled(out, call.style == 5 ? 1e-6 : 1.0);
  if (lse) v.lse_grad = filled(*lse, 1.0);
  return v;
}

}  // namespace fulmen::fuzz
