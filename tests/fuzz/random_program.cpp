#include "tests/fuzz/random_program.h"

#include <algorithm>
#include <random>

#include "ops/builder.h"
#include "ops/reference_loops.h"

namespace fulmen::fuzz {
namespace {

class Writer {
 public:
  Writer(uint64_t seed, const RandomOptions& options) : rng_(seed), options_(options), builder_(program_.trace) {}

  RandomProgram write() {
    program_.trace.name = "fuzz";
    const int inputs = number(1, 4);
    for (int i = 0; i < inputs; ++i) add_input();
    for (int i = 0; i < options_.nodes; ++i) add_node();
    // The last values, and one from the middle: a program with several results.
    program_.trace.outputs.push_back(values_.back());
    if (chance(2)) program_.trace.outputs.push_back(pick());
    return std::move(program_);
  }

 private:
  int number(int low, int high) { return std::uniform_int_distribution<int>(low, high)(rng_); }
  bool chance(int one_in) { return number(1, one_in) == 1; }
  template <class T>
  const T& one_of(const std::vector<T>& items) {
    return items[static_cast<size_t>(number(0, static_cast<int>(items.size()) - 1))];
  }
  ValueId pick() { return one_of(values_); }
  TensorType type(ValueId id) { return builder_.type(id); }

  int64_t draw_size() {
    if (chance(25)) return 0;
    if (chance(6)) return 1;
    return one_of<int64_t>({2, 3, 4, 5, 7, 8, 13, 16, 17});
  }

  void add_input() {
    TensorType t;
    t.dtype = DType::f32;
    if (options_.half_floats) t.dtype = one_of<DType>({DType::f32, DType::bf16, DType::f16});
    const int rank = number(0, 3);
    for (int d = 0; d < rank; ++d) t.shape.push_back(draw_size());
    t.strides = contiguous_strides(t.shape);
    if (rank == 2 && chance(3)) t.strides = {1, std::max<int64_t>(t.shape[0], 1)};  // transposed
    if (rank > 0 && chance(6)) t.strides[static_cast<size_t>(number(0, rank - 1))] = 0;
    if (rank == 2 && chance(6)) t.strides = {std::max<int64_t>(t.shape[1], 1) + 3, 1};  // row gaps
    t.requires_grad = !chance(3);
    const ValueId id = program_.trace.add_input(t);
    HostTensor memory = make_host(DType::f64, {span_elements(t.shape, t.strides)});
    for (double& element : memory.f) element = round_float(std::normal_distribution<double>()(rng_), t.dtype);
    HostTensor value = make_host(t);
    for_each_index(t.shape, [&](const Dims& index, int64_t linear) { copy_element(memory, linear_index(index, t.strides), value, linear); });
    program_.inputs.push_back(std::move(value));
    values_.push_back(id);
  }

  // Keeps values of moderate size, so that errors stay comparable.
  void keep(ValueId id) { values_.push_back(id); }

  void add_node() {
    switch (number(0, 11)) {
      case 0:
      case 1:
      case 2: return unary();
      case 3:
      case 4: return binary();
      case 5: return reduce();
      case 6: return move();
      case 7: return product();
      case 8: return soft();
      case 9: return pick_rows();
      case 10: return normalise();
      default: return choose();
    }
  }

  void unary() {
    static const std::vector<std::string> names = {"neg",  "tanh", "sigmoid", "sin",  "cos",        "gelu", "silu",  "softplus",
                                                   "relu", "abs",  "erf",     "elu",  "leaky_relu", "log_sigmoid"};
    keep(builder_.emit1(one_of(names), {pick()}));
  }

  void binary() {
    static const std::vector<std::string> names = {"add", "sub", "mul", "maximum", "minimum"};
    const ValueId a = pick();
    for (int attempt = 0; attempt < 8; ++attempt) {
      const ValueId b = pick();
      if (!broadcast_shapes(type(a).shape, type(b).shape)) continue;
      const std::string& name = one_of(names);
      ValueId result = builder_.emit1(name, {a, b});
      if (name == "mul") result = builder_.emit1("tanh", {result});
      return keep(result);
    }
    // Nothing fits: a number does.
    keep(builder_.mul(a, 0.5));
  }

  void reduce() {
    const ValueId x = pick();
    const TensorType t = type(x);
    if (t.rank() == 0) return unary();
    Dims dims;
    for (int d = 0; d < t.rank(); ++d)
      if (chance(2)) dims.push_back(d);
    if (dims.empty()) dims.push_back(t.rank() - 1);
    static const std::vector<std::string> names = {"sum", "mean", "amax", "amin"};
    std::string name = one_of(names);
    if (t.element_count() == 0) name = "sum";
    const ValueId result = builder_.emit1(name, {x}, {{"dims", dims}, {"keepdim", chance(2)}});
    keep(name == "sum" ? builder_.emit1("tanh", {result}) : result);
  }

  void move() {
    const ValueId x = pick();
    const TensorType t = type(x);
    const int rank = t.rank();
    if (rank == 0) return keep(builder_.reshape(x, {1}));
    const int64_t dim = number(0, rank - 1), size = t.shape[static_cast<size_t>(dim)];
    switch (number(0, 7)) {
      case 0: {
        Dims dims(static_cast<size_t>(rank));
        for (int d = 0; d < rank; ++d) dims[static_cast<size_t>(d)] = d;
        std::shuffle(dims.begin(), dims.end(), rng_);
        return keep(builder_.emit1("permute", {x}, {{"dims", dims}}));
      }
      case 1: return keep(builder_.reshape(x, {t.element_count()}));
      case 2: {
        if (size < 2) return unary();
        const int64_t begin = number(0, static_cast<int>(size) - 1), end = number(static_cast<int>(begin), static_cast<int>(size));
        return keep(builder_.slice(x, dim, begin, end, number(1, 3)));
      }
      case 3: {
        if (t.element_count() > 512) return unary();
        return keep(builder_.emit1("cat", {x, builder_.emit1("neg", {x}), x}, {{"dim", dim}}));
      }
      case 4: {
        if (t.element_count() > 512) return unary();
        Dims pads(static_cast<size_t>(rank) * 2);
        for (int64_t& pad : pads) pad = number(0, 2);
        return keep(builder_.emit1("pad", {x}, {{"pads", pads}, {"value", 0.25}}));
      }
      case 5: {
        if (rank >= 4 || t.element_count() > 512) return unary();
        Dims shape = t.shape;
        shape.insert(shape.begin(), number(1, 3));
        return keep(builder_.expand(x, shape));
      }
      case 6: return keep(builder_.emit1("flip", {x}, {{"dims", Dims{dim}}}));
      default: return rank < 4 ? keep(builder_.unsqueeze(x, dim)) : unary();
    }
  }

  void product() {
    const ValueId a = pick();
    const TensorType t = type(a);
    if (t.rank() < 2 || t.rank() > 3) return unary();
    // b[k, n] from a's own rows: shapes always fit.
    ValueId b = builder_.transpose(a, -1, -2);
    if (chance(2)) b = builder_.emit1("tanh", {b});
    keep(builder_.emit1("tanh", {builder_.mul(builder_.matmul(a, b), 0.25)}));
  }

  void soft() {
    const ValueId x = pick();
    const TensorType t = type(x);
    if (t.rank() == 0 || t.element_count() == 0) return unary();
    keep(builder_.emit1(chance(2) ? "softmax" : "log_softmax", {x}, {{"dim", int64_t{number(0, t.rank() - 1)}}}));
  }

  // Positions made in the program, so that they are in range by construction.
  void pick_rows() {
    const ValueId x = pick();
    const TensorType t = type(x);
    if (t.rank() == 0 || t.element_count() == 0 || t.element_count() > 512) return unary();
    const int64_t dim = number(0, t.rank() - 1), size = t.shape[static_cast<size_t>(dim)];
    const ValueId positions = builder_.emit1("arange", {}, {{"start", int64_t{size - 1}}, {"end", int64_t{-1}}, {"step", int64_t{-number(1, 2)}}});
    switch (number(0, 3)) {
      case 0: return keep(builder_.emit1("index_select", {x, positions}, {{"dim", dim}}));
      case 1: {
        const ValueId rows = builder_.emit1("index_select", {x, positions}, {{"dim", dim}});
        return keep(builder_.emit1("tanh", {builder_.emit1("index_add", {x, positions, rows}, {{"dim", dim}})}));
      }
      case 2: return keep(builder_.emit("sort", {x}, {{"dim", dim}, {"descending", chance(2)}})[0]);
      default: return keep(builder_.emit("topk", {x}, {{"k", int64_t{number(1, static_cast<int>(size))}}, {"dim", dim}})[0]);
    }
  }

  void normalise() {
    const ValueId x = pick();
    const TensorType t = type(x);
    if (t.rank() == 0 || t.element_count() == 0) return unary();
    switch (number(0, 2)) {
      case 0: return keep(builder_.emit1("layer_norm", {x, no_value, no_value}, {{"normalized_ndim", int64_t{1}}, {"eps", 0.1}}));
      case 1: return keep(builder_.emit1("rms_norm", {x, no_value}, {{"normalized_ndim", int64_t{1}}, {"eps", 0.1}}));
      default: return keep(builder_.emit1("tanh", {builder_.emit1("cumsum", {x}, {{"dim", int64_t{number(0, t.rank() - 1)}}})}));
    }
  }

  void choose() {
    const ValueId x = pick();
    const ValueId other = builder_.emit1("sin", {x});
    if (chance(2) && options_.half_floats) return keep(builder_.convert(x, one_of<DType>({DType::f32, DType::bf16, DType::f16})));
    const ValueId above = builder_.emit1("gt", {x, builder_.number(0.1, type(x).dtype)});
    keep(builder_.where(above, x, other));
  }

  std::mt19937_64 rng_;
  RandomOptions options_;
  RandomProgram program_;
  Builder builder_;
  std::vector<ValueId> values_;
};

}  // namespace

RandomProgram random_program(uint64_t seed, const RandomOptions& options) { return Writer(seed, options).write(); }

}  // namespace fulmen::fuzz
