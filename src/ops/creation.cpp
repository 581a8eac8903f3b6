// Ops that make tensors from attributes alone. `device` says where the result lies ("cpu", "cuda:0"); none is the CPU,
// and a 0-dim CPU value may stand beside operands of any device.
#include <charconv>

#include "ops/builder.h"
#include "ops/families.h"
#include "ops/reference_loops.h"
#include "ops/rules/dims.h"

namespace fulmen {
namespace {

AttrDef device_attribute() { return {"device", AttrKind::text, AttrValue()}; }

Device device_attr(const CallTypes& call) {
  if (!call.attrs.has("device")) return {};
  const std::string& text = call.attrs.get_text("device");
  if (text == "cpu") return {};
  if (text == "meta") return {DeviceKind::meta, 0};
  if (text == "cuda") return {DeviceKind::cuda, 0};
  if (text.starts_with("cuda:")) {
    int index = -1;
    const char* end = text.data() + text.size();
    if (std::from_chars(text.data() + 5, end, index).ptr == end && index >= 0) return {DeviceKind::cuda, index};
  }
  call.type_error("device is \"" + text + "\", needed \"cpu\", \"meta\", \"cuda\" or \"cuda:N\"");
}

const Dims& checked_shape(const CallTypes& call) {
  const Dims& shape = call.attrs.get_dims("shape");
  for (int64_t size : shape)
    if (size < 0) call.shape_error("shape is " + to_string(shape) + "; sizes must be 0 or more");
  return shape;
}

bool is_whole(const Attributes& attrs, std::string_view name) { return !std::holds_alternative<double>(*attrs.find(name)); }

// ceil((end - start) / step), exact for integers.
int64_t arange_count(const CallTypes& call) {
  const double step = call.attrs.get_float("step");
  if (step == 0) call.shape_error("step is 0, needed another number");
  if (is_whole(call.attrs, "start") && is_whole(call.attrs, "end") && is_whole(call.attrs, "step")) {
    const int64_t by = call.attrs.get_int("step"), span = call.attrs.get_int("end") - call.attrs.get_int("start");
    if ((span < 0) != (by < 0)) return 0;
    return by > 0 ? (span + by - 1) / by : (span + by + 1) / by;
  }
  const double count = std::ceil((call.attrs.get_float("end") - call.attrs.get_float("start")) / step);
  if (!(count < 1e15)) call.shape_error("start, end and step give too many elements, or are no finite numbers");
  return count > 0 ? static_cast<int64_t>(count) : 0;
}

OpDef full() {
  return OpDef{
      {.name = "full"},
      "A tensor of this shape in which every element is `value`.",
      /*operands=*/{},
      {{"shape", AttrKind::dims, std::nullopt}, {"value", AttrKind::number, std::nullopt}, {"dtype", AttrKind::dtype, AttrValue(DType::f32)}, device_attribute()},
      [](const CallTypes& call) -> std::vector<TensorType> {
        return {contiguous_type(call.attrs.get_dtype("dtype"), checked_shape(call), device_attr(call))};
      },
      Primitive{[](const ReferenceArgs& args) {
        HostTensor& out = args.outputs[0];
        HostTensor number = make_host(is_whole(args.attrs, "value") ? DType::i64 : DType::f64, {});
        if (is_float(number.type.dtype))
          number.f[0] = args.attrs.get_float("value");
        else
          number.i[0] = args.attrs.get_int("value");
        for (int64_t k = 0; k < out.type.element_count(); ++k) copy_element(number, 0, out, k);
      }},
      NotDifferentiable{"it has no operands"},
      Autocast::keep,
      {{{"plain", {}, {{"shape", Dims{3, 5}}, {"value", 0.25}}},
        {"scalar", {}, {{"shape", Dims{}}, {"value", -1.5}, {"dtype", DType::f64}}},
        {"empty", {}, {{"shape", Dims{0, 2}}, {"value", 1.0}}},
        {"bf16", {}, {{"shape", Dims{7}}, {"value", 3.0}, {"dtype", DType::bf16}}},
        {"infinite", {}, {{"shape", Dims{2}}, {"value", -std::numeric_limits<double>::infinity()}}},
        {"integers", {}, {{"shape", Dims{2, 2}}, {"value", int64_t{9007199254740993}}, {"dtype", DType::i64}}},
        {"bools", {}, {{"shape", Dims{3}}, {"value", true}, {"dtype", DType::boolean}}}},
       {{{"negative", {}, {{"shape", Dims{2, -1}}, {"value", 0.0}}}, "ShapeError", "full: shape is [2,-1]; sizes must be 0 or more"},
        {{"no_value", {}, {{"shape", Dims{2}}}}, "TypeError", "attribute 'value' is not given"},
        {{"device", {}, {{"shape", Dims{2}}, {"value", 0.0}, {"device", std::string("tpu")}}}, "TypeError", "device is \"tpu\", needed"}}},
      {"torch.full"}};
}

OpDef arange() {
  return OpDef{
      {.name = "arange"},
      "start, start + step, ... below `end` (above it for a negative step). Without a dtype: i64 if all three are integers, else f32.",
      /*operands=*/{},
      {{"start", AttrKind::number, std::nullopt},
       {"end", AttrKind::number, std::nullopt},
       {"step", AttrKind::number, AttrValue(int64_t{1})},
       {"dtype", AttrKind::dtype, AttrValue()},
       device_attribute()},
      [](const CallTypes& call) -> std::vector<TensorType> {
        const bool whole = is_whole(call.attrs, "start") && is_whole(call.attrs, "end") && is_whole(call.attrs, "step");
        const DType dtype = call.attrs.has("dtype") ? call.attrs.get_dtype("dtype") : whole ? DType::i64 : DType::f32;
        if (dtype == DType::boolean) call.type_error("dtype is bool, needed a number");
        return {contiguous_type(dtype, {arange_count(call)}, device_attr(call))};
      },
      Primitive{[](const ReferenceArgs& args) {
        HostTensor& out = args.outputs[0];
        const bool whole = is_whole(args.attrs, "start") && is_whole(args.attrs, "step");
        for (int64_t k = 0; k < out.type.element_count(); ++k) {
          if (whole && !is_float(out.type.dtype))
            out.i[static_cast<size_t>(k)] = wrap_integer(args.attrs.get_int("start") + k * args.attrs.get_int("step"), out.type.dtype);
          else
            out.set(k, args.attrs.get_float("start") + static_cast<double>(k) * args.attrs.get_float("step"));
        }
      }},
      NotDifferentiable{"it has no operands"},
      Autocast::keep,
      {{{"plain", {}, {{"start", int64_t{0}}, {"end", int64_t{7}}}},
        {"step", {}, {{"start", int64_t{3}}, {"end", int64_t{14}}, {"step", int64_t{4}}}},
        {"down", {}, {{"start", int64_t{5}}, {"end", int64_t{-4}}, {"step", int64_t{-3}}}},
        {"empty", {}, {{"start", int64_t{5}}, {"end", int64_t{2}}}},
        {"floats", {}, {{"start", 0.0}, {"end", 1.0}, {"step", 0.125}}},
        {"inverse_frequencies", {}, {{"start", int64_t{0}}, {"end", int64_t{64}}, {"step", int64_t{2}}, {"dtype", DType::f32}}},
        {"bf16", {}, {{"start", int64_t{0}}, {"end", int64_t{5}}, {"dtype", DType::bf16}}},
        {"i32", {}, {{"start", int64_t{-2}}, {"end", int64_t{3}}, {"dtype", DType::i32}}}},
       {{{"no_step", {}, {{"start", int64_t{0}}, {"end", int64_t{3}}, {"step", int64_t{0}}}}, "ShapeError", "arange: step is 0, needed another number"},
        {{"endless", {}, {{"start", 0.0}, {"end", std::numeric_limits<double>::infinity()}}}, "ShapeError", "too many elements"}}},
      {"torch.arange"}};
}

OpDef eye() {
  return OpDef{
      {.name = "eye"},
      "The n x m matrix with 1 on the diagonal and 0 elsewhere; m is n if none.",
      /*operands=*/{},
      {{"n", AttrKind::integer, std::nullopt},
       {"m", AttrKind::integer, AttrValue()},
       {"dtype", AttrKind::dtype, AttrValue(DType::f32)},
       device_attribute()},
      [](const CallTypes& call) -> std::vector<TensorType> {
        const int64_t n = call.attrs.get_int("n"), m = call.attrs.has("m") ? call.attrs.get_int("m") : n;
        if (n < 0 || m < 0) call.shape_error("n and m are " + std::to_string(n) + " and " + std::to_string(m) + "; sizes must be 0 or more");
        return {contiguous_type(call.attrs.get_dtype("dtype"), {n, m}, device_attr(call))};
      },
      Decomposition{[](Builder& b, const Node& node) -> std::vector<ValueId> {
        const int64_t n = node.attrs.get_int("n"), m = node.attrs.has("m") ? node.attrs.get_int("m") : n;
        const AttrValue device = node.attrs.has("device") ? *node.attrs.find("device") : AttrValue();
        const auto count = [&](int64_t end) { return b.emit1("arange", {}, {{"start", int64_t{0}}, {"end", end}, {"device", device}}); };
        const ValueId same = b.emit1("eq", {b.reshape(count(n), {n, 1}), count(m)});
        return {b.convert(same, node.attrs.get_dtype("dtype"))};
      }},
      NotDifferentiable{"it has no operands"},
      Autocast::keep,
      {{{"square", {}, {{"n", int64_t{5}}}},
        {"wide", {}, {{"n", int64_t{3}}, {"m", int64_t{7}}, {"dtype", DType::bf16}}},
        {"empty", {}, {{"n", int64_t{0}}, {"m", int64_t{3}}}},
        {"bools", {}, {{"n", int64_t{4}}, {"dtype", DType::boolean}}}},
       {{{"negative", {}, {{"n", int64_t{-1}}}}, "ShapeError", "eye: n and m are -1 and -1; sizes must be 0 or more"}}},
      {"torch.eye"}};
}

}  // namespace

std::vector<OpDef> creation_ops() {
  std::vector<OpDef> ops;
  for (auto* entry : {full, arange, eye}) ops.push_back(entry());
  return ops;
}

}  // namespace fulmen
