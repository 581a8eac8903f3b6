// How a call is cut: forward and input gradient by images of the batch, the weight gradient by groups or by channels of
// the result, so pieces never write the same element and nothing is summed across them; the cut depends on the shape
// alone, so results don't depend on the thread count. oneDNN chooses its own layouts; operands are reordered to them,
// weights once for all pieces of a size.
#include "executors/onednn/convolution.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>

#include "core/error.h"
#include "core/parallel.h"
#include "executors/onednn/library.h"

namespace fulmen::onednn {
namespace {

enum class Direction { forward, input_grad, weight_grad };
enum Role { x_role, weight_role, y_role, role_count };

constexpr int64_t most_pieces = 8;

size_t aligned(size_t bytes) { return (bytes + 63) / 64 * 64; }

// The call's tensors by role, and the geometry; sizes of one call or of one piece of it.
struct Shape {
  Direction direction = Direction::forward;
  std::array<const TensorType*, role_count> types{};
  const TensorType* bias = nullptr;
  int64_t batch = 0, groups = 1, inputs = 0, outputs = 0;  // channels of one group
  size_t spatial = 0;
  Dims stride, padding, dilation;
};

struct Tensor {
  dnnl_memory_desc_t given{};   // as it lies in the call's memory
  dnnl_memory_desc_t wanted{};  // as the primitive wants it
  Primitive reorder;            // between the two, if they differ
  size_t bytes = 0;             // of the reordered copy
};

// Primitives for pieces of one size.
struct Variant {
  Primitive primitive;
  std::array<Tensor, role_count> tensors;
  dnnl_memory_desc_t bias{};
  dnnl_memory_desc_t scratchpad{};
  size_t scratchpad_bytes = 0, piece_bytes = 0;  // workspace of a piece: copies and scratchpad
  size_t weight_at = 0;                          // offset of the shared copy of the weight
};

struct Piece {
  size_t variant = 0;
  std::array<int64_t, role_count> offset{};  // in elements
  size_t workspace_at = 0;
};

struct Pieces {
  Direction direction = Direction::forward;
  bool has_bias = false;
  std::array<DType, role_count> dtypes{};
  std::vector<Variant> variants;
  std::vector<Piece> list;
  size_t workspace_bytes = 0;
};

Dims list_of(const Attributes& attrs, const char* name, size_t count) {
  const Dims& given = attrs.get_dims(name);
  return given.size() == 1 ? Dims(count, given[0]) : given.empty() ? Dims(count, std::strcmp(name, "padding") ? 1 : 0) : given;
}

Shape shape_of(const Call& call) {
  Shape s;
  const std::string& op = call.op->name;
  if (op == "convolution") {
    s.types = {call.inputs[0], call.inputs[1], call.outputs[0]};
    s.bias = call.inputs.size() > 2 ? call.inputs[2] : nullptr;
  } else if (op == "convolution_input_grad") {
    s.direction = Direction::input_grad;
    s.types = {call.outputs[0], call.inputs[1], call.inputs[0]};
  } else {
    s.direction = Direction::weight_grad;
    s.types = {call.inputs[0], call.outputs[0], call.inputs[1]};
  }
  s.groups = call.attrs->get_int("groups");
  s.batch = s.types[x_role]->shape[0];
  s.inputs = s.types[weight_role]->shape[1];
  s.outputs = s.types[weight_role]->shape[0] / s.groups;
  s.spatial = s.types[x_role]->shape.size() - 2;
  s.stride = list_of(*call.attrs, "stride", s.spatial);
  s.padding = list_of(*call.attrs, "padding", s.spatial);
  s.dilation = list_of(*call.attrs, "dilation", s.spatial);
  return s;
}

std::optional<Refusal> refuse(const Call& call) {
  const std::string op = call.op->name + ": ";
  const auto look = [&](const TensorType& type, const std::string& name) -> std::optional<Refusal> {
    if (type.device.kind != DeviceKind::cpu)
      return Refusal{RefusalCode::wrong_device, op + name + " is on " + to_string(type.device) + ", onednn needs host memory"};
    if (type.dtype != DType::f32 && type.dtype != DType::bf16)
      return Refusal{RefusalCode::wrong_dtype, op + name + " is " + std::string(dtype_name(type.dtype)) + ", onednn takes f32 and bf16"};
    if (type.element_count() == 0)
      return Refusal{RefusalCode::degenerate, op + name + " is " + to_string(type.shape) + ", onednn needs elements"};
    for (size_t d = 0; d < type.shape.size(); ++d)
      if (type.shape[d] > 1 && type.strides[d] <= 0)
        return Refusal{RefusalCode::wrong_layout, op + name + " has stride " + std::to_string(type.strides[d]) + " at dim " + std::to_string(d) + ", onednn needs positive strides"};
    return std::nullopt;
  };
  for (size_t i = 0; i < call.inputs.size(); ++i)
    if (call.inputs[i])
      if (auto refusal = look(*call.inputs[i], call.op->operands[i].name)) return refusal;
  // Its kernels read the bias as if it had no gaps, whatever its description says.
  if (call.op->name == "convolution" && call.inputs.size() > 2 && call.inputs[2] && !call.inputs[2]->is_contiguous())
    return Refusal{RefusalCode::wrong_layout, op + "bias has stride " + std::to_string(call.inputs[2]->strides[0]) + ", onednn needs 1"};
  return look(*call.outputs[0], "the result");
}

dnnl_data_type_t data_type(DType dtype) { return dtype == DType::bf16 ? dnnl_bf16 : dnnl_f32; }

// Descriptions of a piece with these extents: as given, and with the layout left to oneDNN.
void describe(const Shape& s, Role role, dnnl_memory_desc_t& given, dnnl_memory_desc_t& open) {
  const TensorType& type = *s.types[role];
  dnnl_dims_t dims{}, strides{};
  int rank = 0;
  const auto add = [&](int64_t size, int64_t stride) {
    dims[rank] = size;
    strides[rank++] = stride;
  };
  // Strides of dims of size 1 mean nothing, but oneDNN reads them.
  const auto stride_at = [&](size_t d) { return std::max<int64_t>(type.strides[d], 1); };
  if (role == weight_role) {
    if (s.groups > 1) add(s.groups, stride_at(0) * s.outputs);
    add(s.outputs, stride_at(0));
    add(s.inputs, stride_at(1));
  } else {
    add(s.batch, stride_at(0));
    add(s.groups * (role == x_role ? s.inputs : s.outputs), stride_at(1));
  }
  for (size_t d = 2; d < type.shape.size(); ++d) add(type.shape[d], stride_at(d));
  check(library().dnnl_memory_desc_init_by_strides(&given, rank, dims, data_type(type.dtype), strides), "memory_desc_init_by_strides");
  check(library().dnnl_memory_desc_init_by_tag(&open, rank, dims, data_type(type.dtype), dnnl_format_tag_any), "memory_desc_init_by_tag");
}

PrimitiveDesc make_desc(const void* op_desc, const dnnl_primitive_desc* hint) {
  const Library& lib = library();
  dnnl_primitive_attr_t attr = nullptr;
  check(lib.dnnl_primitive_attr_create(&attr), "primitive_attr_create");
  dnnl_status_t status = lib.dnnl_primitive_attr_set_scratchpad_mode(attr, dnnl_scratchpad_mode_user);
  dnnl_primitive_desc_t desc = nullptr;
  if (status == dnnl_success) status = lib.dnnl_primitive_desc_create(&desc, op_desc, attr, lib.engine, hint);
  lib.dnnl_primitive_attr_destroy(attr);
  if (status == dnnl_unimplemented) return nullptr;
  check(status, "primitive_desc_create");
  return PrimitiveDesc(desc);
}

Primitive make_reorder(const dnnl_memory_desc_t& from, const dnnl_memory_desc_t& to) {
  const Library& lib = library();
  dnnl_primitive_desc_t desc = nullptr;
  check(lib.dnnl_reorder_primitive_desc_create(&desc, &from, lib.engine, &to, lib.engine, nullptr), "reorder_primitive_desc_create");
  const PrimitiveDesc owner(desc);
  dnnl_primitive_t primitive = nullptr;
  check(lib.dnnl_primitive_create(&primitive, desc), "primitive_create");
  return Primitive(primitive);
}

// Empty if oneDNN has no implementation; `name` becomes the implementation's.
std::optional<Variant> make_variant(const Shape& s, std::string& name) {
  const Library& lib = library();
  const SingleThread alone;  // a primitive is made for a number of threads
  Variant v;
  std::array<dnnl_memory_desc_t, role_count> open{};
  for (Role role : {x_role, weight_role, y_role}) describe(s, role, v.tensors[role].given, open[role]);
  if (s.bias) {
    const dnnl_dims_t dims{s.groups * s.outputs}, strides{std::max<int64_t>(s.bias->strides[0], 1)};
    check(lib.dnnl_memory_desc_init_by_strides(&v.bias, 1, dims, data_type(s.bias->dtype), strides), "memory_desc_init_by_strides");
  }
  dnnl_dims_t stride{}, dilation{}, padding{};
  for (size_t d = 0; d < s.spatial; ++d) stride[d] = s.stride[d], dilation[d] = s.dilation[d] - 1, padding[d] = s.padding[d];

  dnnl_convolution_desc_t forward{}, backward{};
  const bool trains = s.direction != Direction::forward;
  check(lib.dnnl_dilated_convolution_forward_desc_init(&forward, trains ? dnnl_forward_training : dnnl_forward_inference, dnnl_convolution_direct, &open[x_role],
                                                       &open[weight_role], s.bias ? &v.bias : nullptr, &open[y_role], stride, dilation, padding, padding),
        "dilated_convolution_forward_desc_init");
  PrimitiveDesc desc = make_desc(&forward, nullptr);
  if (!desc) return std::nullopt;
  std::array<dnnl_query_t, role_count> queries{dnnl_query_src_md, dnnl_query_weights_md, dnnl_query_dst_md};
  if (s.direction == Direction::input_grad) {
    check(lib.dnnl_dilated_convolution_backward_data_desc_init(&backward, dnnl_convolution_direct, &open[x_role], &open[weight_role], &open[y_role], stride,
                                                               dilation, padding, padding),
          "dilated_convolution_backward_data_desc_init");
    queries = {dnnl_query_diff_src_md, dnnl_query_weights_md, dnnl_query_diff_dst_md};
  } else if (s.direction == Direction::weight_grad) {
    check(lib.dnnl_dilated_convolution_backward_weights_desc_init(&backward, dnnl_convolution_direct, &open[x_role], &open[weight_role], nullptr,
                                                                  &open[y_role], stride, dilation, padding, padding),
          "dilated_convolution_backward_weights_desc_init");
    queries = {dnnl_query_src_md, dnnl_query_diff_weights_md, dnnl_query_diff_dst_md};
  }
  if (trains) {
    PrimitiveDesc adjoint = make_desc(&backward, desc.get());
    if (!adjoint) return std::nullopt;
    desc = std::move(adjoint);
  }
  dnnl_primitive_t primitive = nullptr;
  check(lib.dnnl_primitive_create(&primitive, desc.get()), "primitive_create");
  v.primitive.reset(primitive);
  const char* text = nullptr;
  if (lib.dnnl_primitive_desc_query(desc.get(), dnnl_query_impl_info_str, 0, &text) == dnnl_success && text) name = text;

  const Role result = s.direction == Direction::forward ? y_role : s.direction == Direction::input_grad ? x_role : weight_role;
  for (Role role : {x_role, weight_role, y_role}) {
    Tensor& t = v.tensors[role];
    t.wanted = *lib.dnnl_primitive_desc_query_md(desc.get(), queries[role], 0);
    if (lib.dnnl_memory_desc_equal(&t.given, &t.wanted)) continue;
    t.reorder = role == result ? make_reorder(t.wanted, t.given) : make_reorder(t.given, t.wanted);
    t.bytes = aligned(lib.dnnl_memory_desc_get_size(&t.wanted));
    if (role != weight_role || result == weight_role) v.piece_bytes += t.bytes;
  }
  v.scratchpad = *lib.dnnl_primitive_desc_query_md(desc.get(), dnnl_query_scratchpad_md, 0);
  v.scratchpad_bytes = aligned(lib.dnnl_memory_desc_get_size(&v.scratchpad));
  v.piece_bytes += v.scratchpad_bytes;
  return v;
}

// Cuts [0, count) into at most most_pieces runs of one length and a shorter last one.
std::vector<std::pair<int64_t, int64_t>> cut(int64_t count) {
  const int64_t length = (count + most_pieces - 1) / most_pieces;
  std::vector<std::pair<int64_t, int64_t>> runs;
  for (int64_t at = 0; at < count; at += length) runs.emplace_back(at, std::min(length, count - at));
  return runs;
}

// Null if oneDNN has no implementation for one of the pieces.
std::shared_ptr<Pieces> make_pieces(const Shape& whole, std::string& name) {
  auto pieces = std::make_shared<Pieces>();
  pieces->direction = whole.direction;
  pieces->has_bias = whole.bias != nullptr;
  for (Role role : {x_role, weight_role, y_role}) pieces->dtypes[role] = whole.types[role]->dtype;
  const bool by_batch = whole.direction != Direction::weight_grad, by_group = !by_batch && whole.groups > 1;
  const int64_t count = by_batch ? whole.batch : by_group ? whole.groups : whole.outputs;
  const Dims &sx = whole.types[x_role]->strides, &sw = whole.types[weight_role]->strides, &sy = whole.types[y_role]->strides;
  std::vector<int64_t> lengths;
  for (const auto& [begin, length] : cut(count)) {
    size_t variant = static_cast<size_t>(std::find(lengths.begin(), lengths.end(), length) - lengths.begin());
    if (variant == lengths.size()) {
      Shape part = whole;
      (by_batch ? part.batch : by_group ? part.groups : part.outputs) = length;
      auto made = make_variant(part, name);
      if (!made) return nullptr;
      if (by_batch && made->tensors[weight_role].reorder) {
        made->weight_at = pieces->workspace_bytes;
        pieces->workspace_bytes += made->tensors[weight_role].bytes;
      }
      pieces->variants.push_back(std::move(*made));
      lengths.push_back(length);
    }
    Piece piece{variant, {}, 0};
    if (by_batch)
      piece.offset = {begin * sx[0], 0, begin * sy[0]};
    else if (by_group)
      piece.offset = {begin * whole.inputs * sx[1], begin * whole.outputs * sw[0], begin * whole.outputs * sy[1]};
    else
      piece.offset = {0, begin * sw[0], begin * sy[1]};
    pieces->list.push_back(piece);
  }
  for (Piece& piece : pieces->list) {
    piece.workspace_at = pieces->workspace_bytes;
    pieces->workspace_bytes += pieces->variants[piece.variant].piece_bytes;
  }
  return pieces;
}

Memory memory_at(const dnnl_memory_desc_t& desc, const void* data) {
  dnnl_memory_t memory = nullptr;
  check(library().dnnl_memory_create(&memory, &desc, library().engine, const_cast<void*>(data)), "memory_create");
  return Memory(memory);
}

void execute(const Primitive& primitive, const Stream& stream, const std::vector<dnnl_exec_arg_t>& args) {
  check(library().dnnl_primitive_execute(primitive.get(), stream.get(), static_cast<int>(args.size()), args.data()), "primitive_execute");
  check(library().dnnl_stream_wait(stream.get()), "stream_wait");
}

Stream make_stream() {
  dnnl_stream_t stream = nullptr;
  check(library().dnnl_stream_create(&stream, library().engine, dnnl_stream_default_flags), "stream_create");
  return Stream(stream);
}

class ConvolutionKernel final : public Kernel {
 public:
  explicit ConvolutionKernel(std::shared_ptr<const Pieces> pieces) : pieces_(std::move(pieces)) {}

  size_t workspace_bytes() const override { return pieces_->workspace_bytes; }

  void run(const RunContext& context, const void* const* inputs, void* const* outputs) const override {
    const Pieces& p = *pieces_;
    std::array<const void*, role_count> data{};
    switch (p.direction) {
      case Direction::forward: data = {inputs[0], inputs[1], outputs[0]}; break;
      case Direction::input_grad: data = {outputs[0], inputs[1], inputs[0]}; break;
      case Direction::weight_grad: data = {inputs[0], outputs[0], inputs[1]}; break;
    }
    char* const workspace = static_cast<char*>(context.workspace);
    if (p.direction != Direction::weight_grad) {
      const SingleThread alone;
      const Stream stream = make_stream();
      for (const Variant& v : p.variants) {
        const Tensor& t = v.tensors[weight_role];
        if (!t.reorder) continue;
        const Memory from = memory_at(t.given, data[weight_role]), to = memory_at(t.wanted, workspace + v.weight_at);
        execute(t.reorder, stream, {{DNNL_ARG_FROM, from.get()}, {DNNL_ARG_TO, to.get()}});
      }
    }
    const void* const bias = p.has_bias ? inputs[2] : nullptr;
    std::atomic<size_t> next{0};
    parallel_region(static_cast<int>(std::min<size_t>(p.list.size(), static_cast<size_t>(thread_count()))), [&](int, int) {
      const SingleThread alone;
      const Stream stream = make_stream();
      for (size_t i; (i = next.fetch_add(1)) < p.list.size();) run_piece(p.list[i], data, bias, workspace, stream);
    });
  }

 private:
  void run_piece(const Piece& piece, const std::array<const void*, role_count>& data, const void* bias, char* workspace,
                 const Stream& stream) const {
    const Pieces& p = *pieces_;
    const Variant& v = p.variants[piece.variant];
    const Role result = p.direction == Direction::forward ? y_role : p.direction == Direction::input_grad ? x_role : weight_role;
    char* at = workspace + piece.workspace_at;
    std::array<Memory, role_count> given, used;
    for (Role role : {x_role, weight_role, y_role}) {
      const Tensor& t = v.tensors[role];
      given[role] = memory_at(t.given, static_cast<const char*>(data[role]) + piece.offset[role] * static_cast<int64_t>(dtype_bytes(p.dtypes[role])));
      if (!t.reorder) continue;
      if (role == weight_role && result != weight_role) {
        used[role] = memory_at(t.wanted, workspace + v.weight_at);
        continue;
      }
      used[role] = memory_at(t.wanted, at);
      at += t.bytes;
      if (role != result) execute(t.reorder, stream, {{DNNL_ARG_FROM, given[role].get()}, {DNNL_ARG_TO, used[role].get()}});
    }
    const auto memory_of = [&](Role role) { return used[role] ? used[role].get() : given[role].get(); };
    const Memory scratchpad = memory_at(v.scratchpad, v.scratchpad_bytes ? at : nullptr);
    const Memory bias_memory = bias ? memory_at(v.bias, bias) : nullptr;
    std::vector<dnnl_exec_arg_t> args{{DNNL_ARG_SCRATCHPAD, scratchpad.get()}};
    switch (p.direction) {
      case Direction::forward:
        args.insert(args.end(), {{DNNL_ARG_SRC, memory_of(x_role)}, {DNNL_ARG_WEIGHTS, memory_of(weight_role)}, {DNNL_ARG_DST, memory_of(y_role)}});
        if (bias) args.push_back({DNNL_ARG_BIAS, bias_memory.get()});
        break;
      case Direction::input_grad:
        args.insert(args.end(), {{DNNL_ARG_DIFF_SRC, memory_of(x_role)}, {DNNL_ARG_WEIGHTS, memory_of(weight_role)}, {DNNL_ARG_DIFF_DST, memory_of(y_role)}});
        break;
      case Direction::weight_grad:
        args.insert(args.end(), {{DNNL_ARG_SRC, memory_of(x_role)}, {DNNL_ARG_DIFF_WEIGHTS, memory_of(weight_role)}, {DNNL_ARG_DIFF_DST, memory_of(y_role)}});
        break;
    }
    execute(v.primitive, stream, args);
    if (used[result])
      execute(v.tensors[result].reorder, stream, {{DNNL_ARG_FROM, used[result].get()}, {DNNL_ARG_TO, given[result].get()}});
  }

  std::shared_ptr<const Pieces> pieces_;
};

}  // namespace

bool is_convolution(const Call& call) {
  const std::string& op = call.op->name;
  return op == "convolution" || op == "convolution_input_grad" || op == "convolution_weight_grad";
}

Claim claim_convolution(const Call& call) {
  if (auto refusal = refuse(call)) return *refusal;
  if (!library().unavailable_reason.empty())
    return Refusal{RefusalCode::unavailable, call.op->name + ": " + library().unavailable_reason};
  std::string name = "convolution";
  const auto pieces = make_pieces(shape_of(call), name);
  if (!pieces)
    return Refusal{RefusalCode::forward_unsupported, call.op->name + ": oneDNN " + library().version + " has no implementation for these shapes and dtypes on this CPU"};
  Plan plan;
  plan.forward = {"onednn::" + name, pieces->workspace_bytes};
  plan.data = std::shared_ptr<const void>(pieces);
  return plan;
}

std::unique_ptr<Kernel> make_convolution_kernel(const Plan& plan) {
  FULMEN_CHECK(plan.data != nullptr);
  return std::make_unique<ConvolutionKernel>(std::static_pointer_cast<const Pieces>(plan.data));
}

}  // namespace fulmen::onednn
