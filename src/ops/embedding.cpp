// Table look-up by row and its gradient. The gradient adds rows in the order of the index, so it is the same from run to
// run. Other gathers and scatters are in indexing.cpp.
#include <algorithm>

#include "ops/axes.h"
#include "ops/families.h"
#include "ops/reference_loops.h"

namespace fulmen {
namespace {

// padding_idx as a row of the table; it counts from the end if negative.
std::optional<int64_t> padding_row(const Attributes& attrs, int64_t rows) {
  if (!attrs.has("padding_idx")) return std::nullopt;
  const int64_t row = attrs.get_int("padding_idx");
  return row < 0 ? row + rows : row;
}

void check_padding(const CallTypes& call, int64_t rows) {
  const auto row = padding_row(call.attrs, rows);
  if (row && (*row < 0 || *row >= rows))
    call.shape_error("padding_idx is " + std::to_string(call.attrs.get_int("padding_idx")) + ", the table has " + std::to_string(rows) +
                     " rows; needed " + std::to_string(-rows) + " to " + std::to_string(rows - 1));
}

int64_t checked_row(const HostTensor& index, int64_t k, int64_t rows, const char* op) {
  const int64_t row = index.i[static_cast<size_t>(k)];
  if (row < 0 || row >= rows)
    throw ShapeError(std::string(op) + ": index has " + std::to_string(row) + " at element " + std::to_string(k) +
                     ", the table has " + std::to_string(rows) + " rows; needed 0 to " + std::to_string(rows - 1));
  return row;
}

void need_index(const CallTypes& call, size_t i) {
  if (call[i].dtype != DType::i32 && call[i].dtype != DType::i64)
    call.type_error(operand_name(call.op, i) + " is " + text_of(call[i].dtype) + ", needed i32 or i64");
}

}  // namespace

std::vector<OpDef> embedding_ops() {
  std::vector<OpDef> ops;
  ops.push_back({
      {.name = "embedding"},
      /*doc=*/
      "Rows of a table: weight is (rows, width), index any shape of i32 or i64; the result is index's shape + (width). An index "
      "outside the table is a ShapeError when it runs. The row padding_idx gets no gradient.",
      /*operands=*/{{"weight"}, {"index"}},
      /*attributes=*/{{"padding_idx", AttrKind::integer, std::monostate{}}},
      /*shape=*/[](const CallTypes& call) -> std::vector<TensorType> {
        need_rank(call, 0, 2, 2);
        need_index(call, 1);
        check_padding(call, call[0].shape[0]);
        Dims shape = call[1].shape;
        shape.push_back(call[0].shape[1]);
        return {contiguous_type(call[0].dtype, shape)};
      },
      /*meaning=*/Primitive{[](const ReferenceArgs& args) {
        const HostTensor &weight = *args.inputs[0], &index = *args.inputs[1];
        const int64_t width = weight.type.shape[1];
        for (int64_t k = 0; k < index.type.element_count(); ++k) {
          const int64_t row = checked_row(index, k, weight.type.shape[0], "embedding");
          for (int64_t j = 0; j < width; ++j) copy_element(weight, row * width + j, args.outputs[0], k * width + j);
        }
      }},
      /*gradient=*/GradientRule{[](Builder& b, const GradientArgs& args) -> std::vector<ValueId> {
        Attributes attrs{{"rows", b.type(args.inputs[0]).shape[0]}};
        if (args.node.attrs.has("padding_idx")) attrs.set("padding_idx", args.node.attrs.get_int("padding_idx"));
        return {b.emit1("embedding_grad", {args.output_grads[0], args.inputs[1]}, attrs), no_value};
      }},
      /*autocast=*/Autocast::keep,
      /*samples=*/
      {{{"tokens", {"f32[16,7]", "i64[2,5]"}, {}},
        {"one", {"f32[16,3]", "i64[]"}, {}},
        {"no_tokens", {"f32[16,3]", "i64[0]"}, {}},
        {"i32", {"f32[16,8]", "i32[11]"}, {}},
        {"row_gaps", {"f32[16,5]{stride=8,1}", "i64[5]"}, {}},
        {"transposed", {"f32[16,5]{stride=1,16}", "i64[3,2]{stride=1,3}"}, {}},
        {"bf16", {"bf16[16,9]", "i64[7]"}, {}}},
       {{{"index_dtype", {"f32[16,3]", "f32[4]"}, {}}, "TypeError", "index is f32, needed i32 or i64"},
        {{"table_rank", {"f32[16]", "i64[4]"}, {}}, "ShapeError", "weight has 1 dims, needed 2"},
        {{"padding_row", {"f32[16,3]", "i64[4]"}, {{"padding_idx", int64_t{16}}}}, "ShapeError", "padding_idx is 16"}}},
      /*torch=*/{},
  });
  ops.push_back({
      {.name = "embedding_grad"},
      /*doc=*/
      "Adds the rows of grad (index's shape + (width)) into a zero table (rows, width) at index; rows at padding_idx are left out. "
      "Sums in f32 or wider, in the order of the index: the same bits from run to run.",
      /*operands=*/{{"grad"}, {"index"}},
      /*attributes=*/{{"rows", AttrKind::integer, std::nullopt}, {"padding_idx", AttrKind::integer, std::monostate{}}},
      /*shape=*/[](const CallTypes& call) -> std::vector<TensorType> {
        need_index(call, 1);
        need_float(call, 0);
        need_rank(call, 0, 1, 100);
        Dims lead(call[0].shape.begin(), call[0].shape.end() - 1);
        if (lead != call[1].shape)
          call.shape_error("grad is " + to_string(call[0].shape) + ", index is " + to_string(call[1].shape) +
                           "; grad needs index's shape and one more dim");
        const int64_t rows = call.attrs.get_int("rows");
        if (rows < 0) call.shape_error("rows is " + std::to_string(rows) + ", needed 0 or more");
        check_padding(call, rows);
        return {contiguous_type(call[0].dtype, {rows, call[0].shape.back()})};
      },
      /*meaning=*/Primitive{[](const ReferenceArgs& args) {
        const HostTensor &grad = *args.inputs[0], &index = *args.inputs[1];
        HostTensor& out = args.outputs[0];
        std::fill(out.f.begin(), out.f.end(), 0.0);
        const int64_t rows = out.type.shape[0], width = out.type.shape[1];
        const auto padding = padding_row(args.attrs, rows);
        for (int64_t k = 0; k < index.type.element_count(); ++k) {
          const int64_t row = checked_row(index, k, rows, "embedding_grad");
          if (padding && row == *padding) continue;
          for (int64_t j = 0; j < width; ++j) out.f[static_cast<size_t>(row * width + j)] += grad.f[static_cast<size_t>(k * width + j)];
        }
      }},
      /*gradient=*/GradientRule{[](Builder& b, const GradientArgs& args) -> std::vector<ValueId> {
        // Linear in grad: the adjoint looks rows up again, without those at padding_idx.
        const ValueId index = args.inputs[1];
        ValueId rows = b.emit1("embedding", {args.output_grads[0], index}, {});
        if (const auto padding = padding_row(args.node.attrs, args.node.attrs.get_int("rows"))) {
          const DType dtype = b.type(rows).dtype;
          const ValueId at_padding = b.emit1("eq", {b.unsqueeze(index, -1), b.number(static_cast<double>(*padding), DType::i64)});
          rows = b.where(at_padding, b.number(0.0, dtype), rows);
        }
        return {rows, no_value};
      }},
      /*autocast=*/Autocast::keep,
      /*samples=*/
      {{{"tokens", {"f32[2,5,7]", "i64[2,5]"}, {{"rows", int64_t{16}}}},
        {"one", {"f32[3]", "i64[]"}, {{"rows", int64_t{16}}}},
        {"no_tokens", {"f32[0,3]", "i64[0]"}, {{"rows", int64_t{16}}}},
        {"padding", {"f32[13,3]", "i64[13]"}, {{"rows", int64_t{16}}, {"padding_idx", int64_t{0}}}},
        {"expanded", {"f32[7,3]{stride=0,0}", "i64[7]"}, {{"rows", int64_t{16}}}},
        {"bf16", {"bf16[31,9]", "i32[31]"}, {{"rows", int64_t{16}}}}},
       {{{"shapes", {"f32[5,3]", "i64[4]"}, {{"rows", int64_t{16}}}}, "ShapeError", "grad needs index's shape and one more dim"},
        {{"rows", {"f32[4,3]", "i64[4]"}, {{"rows", int64_t{-1}}}}, "ShapeError", "rows is -1"}}},
      /*torch=*/{},
  });
  return ops;
}

}  // namespace fulmen
