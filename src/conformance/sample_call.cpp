#include "conformance/sample_call.h"

#include <algorithm>
#include <cctype>
#include <map>
#include <numeric>
#include <ostream>
#include <random>

#include "ops/reference_loops.h"

namespace fulmen::conformance {
namespace {

// What the sample's positions may be: below this size, the dim they index.
int64_t index_limit(const OpDef& op, const Sample& sample, const Trace& trace, size_t operand) {
  if (op.name == "one_hot") return sample.attrs.get_int("num_classes");
  const TensorType& x = trace.type(trace.nodes[0].inputs[0]);
  if (const AttrValue* dim = sample.attrs.find("dim"); dim && x.rank() > 0)
    return x.shape[static_cast<size_t>(std::get<int64_t>(*dim) < 0 ? std::get<int64_t>(*dim) + x.rank() : std::get<int64_t>(*dim))];
  if (const AttrValue* dims = sample.attrs.find("dims"); dims && (op.name == "index" || op.name == "index_put")) {
    const int64_t d = std::get<Dims>(*dims).at(operand - (op.name == "index" ? 1 : 2));
    return x.shape[static_cast<size_t>(d < 0 ? d + x.rank() : d)];
  }
  return x.rank() == 0 ? 1 : 16;  // class indices and table rows: samples have 16 of them or more
}

bool holds_positions(const std::string& operand) { return operand == "index" || operand == "indices" || operand == "target"; }

// Operands that an op refuses a gradient for.
bool has_no_gradient(const OpDef& op, size_t operand) {
  const std::string& name = op.operands[std::min(operand, op.operands.size() - 1)].name;
  return (op.name == "cross_entropy" && name == "weight") || (op.name == "batch_norm" && name.starts_with("running_"));
}

double draw_float(const std::string& domain, std::mt19937_64& rng) {
  const auto uniform = [&](double low, double high) { return std::uniform_real_distribution<double>(low, high)(rng); };
  if (domain == "positive") return uniform(0.2, 3.0);
  if (domain == "above_one") return uniform(1.1, 4.0);
  if (domain == "unit") return uniform(0.05, 0.95);
  if (domain == "small_int") return static_cast<double>(std::uniform_int_distribution<int>(-3, 3)(rng));
  if (domain == "nonzero") return uniform(0.3, 2.5) * (rng() & 1 ? 1.0 : -1.0);
  return std::normal_distribution<double>()(rng);
}

int64_t draw_integer(const std::string& domain, DType dtype, std::mt19937_64& rng) {
  if (dtype == DType::boolean) return static_cast<int64_t>(rng() & 1);
  const bool positive = domain == "positive" || dtype == DType::u8;
  const int64_t value = std::uniform_int_distribution<int64_t>(positive ? 0 : -5, 5)(rng);
  if (value == 0 && (domain == "nonzero" || domain == "positive")) return 2;
  return value;
}

}  // namespace

void PrintTo(const SampleCall& call, std::ostream* out) { *out << call.id; }

const std::vector<SampleCall>& all_sample_calls() {
  static const std::vector<SampleCall> calls = [] {
    std::vector<SampleCall> all;
    for (const OpDef* op : all_ops())
      for (const Sample& sample : op->samples.good) all.push_back({op, &sample, op->name + "_" + sample.name});
    return all;
  }();
  return calls;
}

Marks gradient_marks(const Sample& sample) {
  for (const std::string& spec : sample.inputs)
    if (spec.ends_with('!')) return Marks::as_written;
  return Marks::every_float;
}

Trace trace_of(const OpDef& op, const Sample& sample, Marks marks) {
  Trace trace;
  trace.name = "sample";
  Node node;
  node.op = &op;
  for (const std::string& spec : sample.inputs) {
    if (spec == "none") {
      node.inputs.push_back(no_value);
      continue;
    }
    TensorType type = parse_tensor_spec(spec);
    if (marks == Marks::none) type.requires_grad = false;
    if (marks == Marks::every_float) type.requires_grad = is_float(type.dtype) && !has_no_gradient(op, node.inputs.size());
    node.inputs.push_back(trace.add_input(type));
  }
  node.attrs = sample.attrs;
  const auto types = Builder(trace).infer(op, node.inputs, node.attrs);
  const bool variadic = !op.operands.empty() && op.operands.back().need == Need::variadic;
  if (!variadic) node.inputs.resize(op.operands.size(), no_value);
  for (const TensorType& type : types) {
    const bool unwanted = op.name == "sdpa_backward" && type.shape == Dims{0};  // gradients that `needs` leaves out
    node.outputs.push_back(unwanted ? no_value : trace.add_value(type));
    if (!unwanted) trace.outputs.push_back(node.outputs.back());
  }
  trace.nodes.push_back(std::move(node));
  return trace;
}

std::vector<HostTensor> values_of(const OpDef& op, const Sample& sample, const Trace& trace, Values kind) {
  const bool generic = kind == Values::generic;
  const std::string domain = generic && sample.domain == "small_int" ? "normal" : sample.domain;
  std::seed_seq seed{std::hash<std::string>{}(op.name), std::hash<std::string>{}(sample.name)};
  std::mt19937_64 rng(seed);
  std::vector<HostTensor> values;
  const Node& node = trace.nodes[0];
  for (size_t i = 0; i < node.inputs.size(); ++i) {
    if (node.inputs[i] == no_value) continue;
    TensorType type = trace.type(node.inputs[i]);
    if (generic) type = contiguous_type(type.dtype, type.shape);
    const std::string& operand = op.operands[std::min(i, op.operands.size() - 1)].name;
    const int64_t limit = holds_positions(operand) && is_integer(type.dtype) ? index_limit(op, sample, trace, i) : 0;
    // One element a place of memory, so that strides of 0 give equal elements.
    const int64_t span = span_elements(type.shape, type.strides);
    HostTensor memory = make_host(type.dtype, {span});
    Dims order(static_cast<size_t>(std::max<int64_t>(limit, 1)));
    std::iota(order.begin(), order.end(), int64_t{0});
    std::shuffle(order.begin(), order.end(), rng);
    for (int64_t k = 0; k < span; ++k) {
      const auto at = static_cast<size_t>(k);
      if (is_float(type.dtype))
        memory.f[at] = round_float(draw_float(domain, rng), generic ? DType::f64 : type.dtype);
      else if (operand == "seed")
        memory.i[at] = k % 2 ? static_cast<int64_t>(rng() % 1000) : static_cast<int64_t>(rng());
      else if (limit > 0 && sample.domain == "signed")
        memory.i[at] = std::uniform_int_distribution<int64_t>(-limit, limit - 1)(rng);
      else if (limit > 0)
        memory.i[at] = std::uniform_int_distribution<int64_t>(0, limit - 1)(rng);
      else
        memory.i[at] = draw_integer(sample.domain, type.dtype, rng);
    }
    HostTensor value = make_host(type);
    for_each_index(type.shape, [&](const Dims& index, int64_t linear) {
      copy_element(memory, linear_index(index, type.strides), value, linear);
    });
    if (limit > 0 && sample.domain == "distinct") {  // along the indexed dim, no position twice
      const int64_t rank = type.rank();
      int64_t dim = 0;
      if (const AttrValue* attr = sample.attrs.find("dim")) dim = std::get<int64_t>(*attr);
      if (dim < 0) dim += rank;
      for_each_index(type.shape, [&](const Dims& index, int64_t linear) {
        value.i[static_cast<size_t>(linear)] = rank ? order[static_cast<size_t>(index[static_cast<size_t>(dim)])] : 0;
      });
    }
    values.push_back(std::move(value));
  }
  return values;
}

HostTensor normal_values(const TensorType& type, uint64_t seed) {
  std::mt19937_64 rng(seed);
  HostTensor value = make_host(type);
  for (double& element : value.f) element = std::normal_distribution<double>()(rng);
  return value;
}

}  // namespace fulmen::conformance
