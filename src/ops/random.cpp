// Random ops. All draw from Philox with a seed tensor i64[2] (key, counter offset) by the mapping of core/philox.h:
// element n in row-major order, whatever the executor, threads or tiles. `offset` is added to the seed's counter offset,
// so that several ops of one program share a seed; whoever records a program advances it by philox_draws(elements).
#include <numbers>

#include "core/philox.h"
#include "ops/builder.h"
#include "ops/families.h"
#include "ops/reference_loops.h"
#include "ops/rules/dims.h"

namespace fulmen {
namespace {

constexpr uint64_t angle_row = 1;  // the row of the second uniform of `normal`

struct Stream {
  uint64_t key, offset;
  uint32_t word(int64_t n, uint64_t row = 0) const { return philox_word(key, offset, row, static_cast<uint64_t>(n)); }
};

Stream stream_of(const HostTensor& seed, const Attributes& attrs) {
  return {static_cast<uint64_t>(seed.i[0]), static_cast<uint64_t>(seed.i[1]) + static_cast<uint64_t>(attrs.get_int("offset"))};
}

void check_seed(const CallTypes& call, size_t i) {
  if (call[i].dtype != DType::i64) call.type_error("seed is " + std::string(dtype_name(call[i].dtype)) + ", needed i64");
  if (call[i].shape != Dims{2}) call.shape_error("seed is " + to_string(call[i].shape) + ", needed [2]: key and counter offset");
  if (call.attrs.get_int("offset") < 0) call.shape_error("offset is " + std::to_string(call.attrs.get_int("offset")) + ", needed 0 or more");
}

void check_probability(const CallTypes& call) {
  const double p = call.attrs.get_float("p");
  if (!(p >= 0.0 && p <= 1.0)) call.shape_error("p is " + to_string(*call.attrs.find("p")) + ", needed a probability from 0 to 1");
}

const Dims& checked_shape(const CallTypes& call) {
  const Dims& shape = call.attrs.get_dims("shape");
  for (int64_t size : shape)
    if (size < 0) call.shape_error("shape is " + to_string(shape) + "; sizes must be 0 or more");
  return shape;
}

ShapeRule drawn_shape() {
  return [](const CallTypes& call) -> std::vector<TensorType> {
    check_seed(call, 0);
    const DType dtype = call.attrs.get_dtype("dtype");
    if (!is_float(dtype)) call.type_error("dtype is " + std::string(dtype_name(dtype)) + ", needed a float dtype");
    return {result_type(dtype, checked_shape(call))};
  };
}

// A multiple of 2^-24, or of 2^-11 and 2^-8 for the 16-bit formats: exact in the dtype, so never rounded up to 1.
double uniform_in(uint32_t word, DType dtype) {
  if (dtype == DType::f16) return static_cast<double>(word >> 21) * 0x1p-11;
  if (dtype == DType::bf16) return static_cast<double>(word >> 24) * 0x1p-8;
  return static_cast<double>(uniform_of_word(word));
}

NotDifferentiable drawn() { return {"its result depends on the seed alone"}; }

std::vector<AttrDef> drawn_attributes() {
  return {{"shape", AttrKind::dims, std::nullopt},
          {"offset", AttrKind::integer, AttrValue(int64_t{0})},
          {"dtype", AttrKind::dtype, AttrValue(DType::f32)}};
}

Samples drawn_samples() {
  return {{{"plain", {"i64[2]"}, {{"shape", Dims{3, 5}}}},
           {"several_blocks", {"i64[2]"}, {{"shape", Dims{5, 67}}, {"offset", int64_t{96}}}},
           {"scalar", {"i64[2]"}, {{"shape", Dims{}}}},
           {"empty", {"i64[2]"}, {{"shape", Dims{0, 3}}}},
           {"strided_seed", {"i64[2]{stride=3}"}, {{"shape", Dims{70}}}},
           {"bf16", {"i64[2]"}, {{"shape", Dims{129}}, {"dtype", DType::bf16}}},
           {"f16", {"i64[2]"}, {{"shape", Dims{129}}, {"dtype", DType::f16}}}},
          {{{"short_seed", {"i64[1]"}, {{"shape", Dims{3}}}}, "ShapeError", "seed is [1], needed [2]"},
           {{"seed_dtype", {"i32[2]"}, {{"shape", Dims{3}}}}, "TypeError", "seed is i32, needed i64"},
           {{"integers", {"i64[2]"}, {{"shape", Dims{3}}, {"dtype", DType::i32}}}, "TypeError", "dtype is i32, needed a float dtype"}}};
}

OpDef uniform() {
  return OpDef{{.name = "uniform"},
               "Numbers uniform in [0, 1), multiples of 2^-24 (f16: 2^-11, bf16: 2^-8).",
               {{"seed"}},
               drawn_attributes(),
               drawn_shape(),
               Primitive{[](const ReferenceArgs& args) {
                 HostTensor& out = args.outputs[0];
                 const Stream stream = stream_of(*args.inputs[0], args.attrs);
                 for (int64_t n = 0; n < out.type.element_count(); ++n) out.set(n, uniform_in(stream.word(n), out.type.dtype));
               }},
               drawn(),
               Autocast::keep,
               drawn_samples(),
               /*torch=*/{}};
}

OpDef normal() {
  return OpDef{{.name = "normal"},
               "Numbers of the standard normal distribution by Box and Muller: sqrt(-2 log(1 - u)) cos(2 pi v), u from the "
               "element's word in row 0, v from its word in row 1.",
               {{"seed"}},
               drawn_attributes(),
               drawn_shape(),
               Primitive{[](const ReferenceArgs& args) {
                 HostTensor& out = args.outputs[0];
                 const Stream stream = stream_of(*args.inputs[0], args.attrs);
                 for (int64_t n = 0; n < out.type.element_count(); ++n) {
                   const double u = static_cast<double>(uniform_of_word(stream.word(n)));
                   const double v = static_cast<double>(uniform_of_word(stream.word(n, angle_row)));
                   out.set(n, std::sqrt(-2.0 * std::log1p(-u)) * std::cos(2.0 * std::numbers::pi * v));
                 }
               }},
               drawn(),
               Autocast::keep,
               drawn_samples(),
               /*torch=*/{}};
}

OpDef dropout_mask() {
  return OpDef{{.name = "dropout_mask"},
               "A bool tensor: false with probability p, independently for each element.",
               {{"seed"}},
               {{"shape", AttrKind::dims, std::nullopt}, {"p", AttrKind::number, std::nullopt}, {"offset", AttrKind::integer, AttrValue(int64_t{0})}},
               [](const CallTypes& call) -> std::vector<TensorType> {
                 check_seed(call, 0);
                 check_probability(call);
                 return {result_type(DType::boolean, checked_shape(call))};
               },
               Primitive{[](const ReferenceArgs& args) {
                 HostTensor& out = args.outputs[0];
                 const Stream stream = stream_of(*args.inputs[0], args.attrs);
                 const uint64_t threshold = dropout_threshold(args.attrs.get_float("p"));
                 for (int64_t n = 0; n < out.type.element_count(); ++n)
                   out.i[static_cast<size_t>(n)] = dropout_keeps(stream.word(n), threshold);
               }},
               drawn(),
               Autocast::keep,
               {{{"plain", {"i64[2]"}, {{"shape", Dims{3, 5}}, {"p", 0.5}}},
                 {"several_blocks", {"i64[2]"}, {{"shape", Dims{5, 67}}, {"p", 0.1}, {"offset", int64_t{96}}}},
                 {"keep_all", {"i64[2]"}, {{"shape", Dims{70}}, {"p", 0.0}}},
                 {"keep_none", {"i64[2]"}, {{"shape", Dims{70}}, {"p", 1.0}}},
                 {"scalar", {"i64[2]"}, {{"shape", Dims{}}, {"p", 0.5}}},
                 {"empty", {"i64[2]"}, {{"shape", Dims{0}}, {"p", 0.5}}}},
                {{{"p", {"i64[2]"}, {{"shape", Dims{3}}, {"p", 1.5}}}, "ShapeError", "dropout_mask: p is 1.5, needed a probability from 0 to 1"},
                 {{"short_seed", {"i64[3]"}, {{"shape", Dims{3}}, {"p", 0.5}}}, "ShapeError", "seed is [3], needed [2]"}}},
               /*torch=*/{}};
}

OpDef dropout() {
  return OpDef{
      {.name = "dropout"},
      "x / (1 - p) where dropout_mask(seed) is true, 0 elsewhere; p = 1 gives zeros. Its gradient is dropout of the result's "
      "gradient with the same seed, so nothing is saved.",
      {{"x"}, {"seed"}},
      {{"p", AttrKind::number, AttrValue(0.5)}, {"offset", AttrKind::integer, AttrValue(int64_t{0})}},
      [](const CallTypes& call) -> std::vector<TensorType> {
        need_float(call, 0);
        check_seed(call, 1);
        check_probability(call);
        return {result_type(call[0].dtype, call[0].shape)};
      },
      Decomposition{[](Builder& b, const Node& node) -> std::vector<ValueId> {
        const ValueId x = node.inputs[0];
        const DType dtype = b.type(x).dtype;
        const Dims shape = b.type(x).shape;
        const double p = node.attrs.get_float("p");
        if (p >= 1.0) return {b.zeros_like(x)};
        const ValueId mask =
            b.emit1("dropout_mask", {node.inputs[1]}, {{"shape", shape}, {"p", p}, {"offset", node.attrs.get_int("offset")}});
        return {b.where(mask, b.mul(x, 1.0 / (1.0 - p)), b.number(0.0, dtype))};
      }},
      GradientRule([](Builder& b, const GradientArgs& args) -> std::vector<ValueId> {
        std::vector<ValueId> grads(2, no_value);
        if (args.need[0] && args.output_grads[0] != no_value)
          grads[0] = b.emit1("dropout", {args.output_grads[0], args.inputs[1]}, args.node.attrs);
        return grads;
      }),
      Autocast::keep,
      {{{"plain", {"f32[3,5]!", "i64[2]"}, {}},
        {"several_blocks", {"f32[5,67]!", "i64[2]"}, {{"p", 0.1}, {"offset", int64_t{32}}}},
        {"transposed", {"f32[7,3]{stride=1,7}!", "i64[2]"}, {{"p", 0.3}}},
        {"keep_all", {"f32[9]!", "i64[2]"}, {{"p", 0.0}}},
        {"keep_none", {"f32[9]!", "i64[2]"}, {{"p", 1.0}}},
        {"bf16", {"bf16[77]!", "i64[2]"}, {{"p", 0.2}}},
        {"empty", {"f32[0]!", "i64[2]"}, {}}},
       {{{"integers", {"i64[3]", "i64[2]"}, {}}, "TypeError", "dropout: x is i64, needed a float dtype"},
        {{"p", {"f32[3]", "i64[2]"}, {{"p", -0.1}}}, "ShapeError", "p is -0.1, needed a probability from 0 to 1"}}},
      /*torch=*/{}};
}

OpDef bernoulli() {
  return OpDef{{.name = "bernoulli"},
               "1 with the probability that x holds for the element, else 0, in x's dtype.",
               {{"x"}, {"seed"}},
               {{"offset", AttrKind::integer, AttrValue(int64_t{0})}},
               [](const CallTypes& call) -> std::vector<TensorType> {
                 need_float(call, 0);
                 check_seed(call, 1);
                 return {result_type(call[0].dtype, call[0].shape)};
               },
               Decomposition{[](Builder& b, const Node& node) -> std::vector<ValueId> {
                 const ValueId x = node.inputs[0];
                 const DType dtype = b.type(x).dtype;
                 const ValueId u = b.emit1("uniform", {node.inputs[1]},
                                           {{"shape", b.type(x).shape}, {"offset", node.attrs.get_int("offset")}, {"dtype", DType::f32}});
                 return {b.convert(b.emit1("lt", {u, x}), dtype)};
               }},
               NotDifferentiable{"its gradient is zero everywhere"},
               Autocast::keep,
               {{{"plain", {"f32[3,5]", "i64[2]"}, {}, "unit"}, {"bf16", {"bf16[70]{stride=2}", "i64[2]"}, {{"offset", int64_t{16}}}, "unit"}},
                {{{"integers", {"i64[3]", "i64[2]"}, {}}, "TypeError", "bernoulli: x is i64, needed a float dtype"}}},
               /*torch=*/{}};
}

}  // namespace

std::vector<OpDef> random_ops() {
  std::vector<OpDef> ops;
  for (auto* entry : {uniform, normal, dropout_mask, dropout, bernoulli}) ops.push_back(entry());
  return ops;
}

}  // namespace fulmen
