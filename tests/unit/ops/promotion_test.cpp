// Result dtypes of pointwise ops over mixed operands, as PyTorch has them.
#include <gtest/gtest.h>

#include "ops/builder.h"
#include "ops/pointwise_entry.h"
#include "ops/table.h"

namespace fulmen {
namespace {

DType result_of(const char* op, const char* a, const char* b, bool b_is_number = false) {
  Trace trace;
  TensorType second = parse_tensor_spec(b);
  second.is_number = b_is_number;
  const ValueId x = trace.add_input(parse_tensor_spec(a)), y = trace.add_input(second);
  Builder builder(trace);
  return builder.type(builder.emit1(op, {x, y})).dtype;
}

TEST(Promotion, TensorsWithDims) {
  EXPECT_EQ(result_of("add", "bf16[2]", "f32[2]"), DType::f32);
  EXPECT_EQ(result_of("add", "bf16[2]", "f16[2]"), DType::f32);
  EXPECT_EQ(result_of("add", "i64[2]", "f16[2]"), DType::f16);
  EXPECT_EQ(result_of("mul", "u8[2]", "i8[2]"), DType::i16);
  EXPECT_EQ(result_of("mul", "bool[2]", "i32[2]"), DType::i32);
  EXPECT_EQ(result_of("add", "bool[2]", "bool[2]"), DType::boolean);
}

TEST(Promotion, ZeroDimAndNumbersCountByCategory) {
  EXPECT_EQ(result_of("add", "bf16[2]", "f32[]"), DType::bf16);
  EXPECT_EQ(result_of("add", "bf16[2]", "f64[]", true), DType::bf16);
  EXPECT_EQ(result_of("add", "i64[2]", "f32[]"), DType::f32);
  EXPECT_EQ(result_of("add", "i32[2]", "i64[]", true), DType::i32);
  EXPECT_EQ(result_of("add", "f32[]", "f64[]"), DType::f64);
}

TEST(Promotion, DivisionAndComparisons) {
  EXPECT_EQ(result_of("div", "i64[2]", "i64[2]"), DType::f32);
  EXPECT_EQ(result_of("div", "bf16[2]", "i64[2]"), DType::bf16);
  EXPECT_EQ(result_of("floor_divide", "i32[2]", "i64[2]"), DType::i64);
  EXPECT_EQ(result_of("lt", "bf16[2]", "i64[2]"), DType::boolean);
  EXPECT_EQ(result_of("pow", "i64[2]", "i64[2]"), DType::i64);
}

// An op is called through the body that its attributes choose.
TEST(PointwiseBodies, NamesFollowAttributes) {
  EXPECT_EQ(pointwise_body_name("gelu", {{"approximate", std::string("tanh")}}), "gelu_tanh");
  EXPECT_EQ(pointwise_body_name("gelu", {{"approximate", std::string("none")}}), "gelu");
  EXPECT_EQ(pointwise_body_name("div", {{"rounding", std::string("trunc")}}), "trunc_divide");
  EXPECT_EQ(pointwise_body_name("div", {{"rounding", AttrValue()}}), "div");
  EXPECT_EQ(pointwise_body_name("softmax", {}), "");
}

}  // namespace
}  // namespace fulmen
