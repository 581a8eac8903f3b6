// The tile machine against the evaluator: pointwise chains, broadcasts, views, reductions, dtypes.
#include "tests/unit/executors/cpu/tile_cases.h"

namespace fulmen::cpu::tile::testing {
namespace {

using Values = std::vector<ValueId>;

ValueId softmax(Builder& b, ValueId x) {
  const ValueId e = b.exp(b.sub(x, b.amax(x, {-1}, true)));
  return b.div(e, b.sum(e, {-1}, true));
}

Values layer_norm(Builder& b, ValueId x, ValueId weight, ValueId bias) {
  const double count = static_cast<double>(b.type(x).shape.back());
  const ValueId mean = b.mul(b.sum(x, {-1}, true), 1.0 / count);
  const ValueId centred = b.sub(x, mean);
  const ValueId variance = b.mul(b.sum(b.mul(centred, centred), {-1}, true), 1.0 / count);
  const ValueId scale = b.emit1("rsqrt", {b.add(variance, 1e-5)});
  return {b.add(b.mul(b.mul(centred, scale), weight), bias), mean, scale};
}

TEST(Tile, EveryPointwiseOpOfOneOperand) {
  for (const char* op : {"neg", "abs", "square", "sign", "exp", "expm1", "sin", "cos", "tanh", "erf", "sigmoid", "floor", "ceil", "trunc",
                         "round", "relu", "gelu", "silu", "log_sigmoid"}) {
    SCOPED_TRACE(op);
    for (const char* spec : {"f32[3,37]", "f32[1]", "f32[]", "f32[5000]", "bf16[3,19]", "f16[2,3]", "f32[37,5]{stride=1,40}"})
      check_case({spec}, [&](Builder& b, const Values& in) { return Values{b.emit1(op, {in[0]})}; }, -3.0, 3.0);
  }
  for (const char* op : {"log", "log1p", "log2", "sqrt", "rsqrt", "reciprocal"}) {
    SCOPED_TRACE(op);
    check_case({"f32[3,701]"}, [&](Builder& b, const Values& in) { return Values{b.emit1(op, {in[0]})}; }, 0.01, 30.0);
  }
}

TEST(Tile, EveryPointwiseOpOfTwoOperands) {
  for (const char* op : {"add", "sub", "mul", "div", "maximum", "minimum", "fmod", "remainder", "atan2", "eq", "lt", "le", "gt", "ge", "ne"}) {
    SCOPED_TRACE(op);
    for (const std::vector<std::string>& specs : std::vector<std::vector<std::string>>{
             {"f32[3,37]", "f32[3,37]"}, {"f32[3,37]", "f32[37]"}, {"f32[3,1]", "f32[3,37]"}, {"f32[]", "f32[3,37]"}, {"f32[3,1]", "f32[1,37]"},
             {"f32[4,3000]", "f32[3000]"}, {"f32[3,5,7]", "f32[3,1,7]"}, {"bf16[11,13]{stride=1,11}", "f32[11,13]"}, {"f32[2,3]", "bf16[2,3]"}})
      check_case(specs, [&](Builder& b, const Values& in) { return Values{b.emit1(op, {in[0], in[1]})}; }, 0.5, 3.0, {2e-6, 4e-6});
  }
}

TEST(Tile, WhereTakesEveryMixOfBroadcasts) {
  for (const char* condition : {"bool[4,9]", "bool[4,1]", "bool[9]", "bool[]"})
    for (const char* yes : {"f32[4,9]", "f32[4,1]", "f32[9]", "f32[]"})
      for (const char* no : {"f32[4,9]", "f32[4,1]", "f32[9]"}) {
        SCOPED_TRACE(std::string(condition) + " " + yes + " " + no);
        check_case({condition, yes, no}, [&](Builder& b, const Values& in) { return Values{b.add(b.where(in[0], in[1], in[2]), in[1])}; });
      }
}

TEST(Tile, SoftmaxOfShortAndLongRows) {
  for (const char* spec : {"f32[5,7]", "f32[1,1]", "f32[64,64]", "f32[3,1000]", "f32[2,50257]", "bf16[3,999]", "bf16[2,30000]", "f32[2,3,4,65]", "f32[9]"}) {
    SCOPED_TRACE(spec);
    check_case({spec}, [](Builder& b, const Values& in) { return Values{softmax(b, in[0])}; });
  }
}

TEST(Tile, LayerNormForwardWithStatistics) {
  for (const char* rows : {"1", "3", "200"})
    for (const char* cols : {"1", "17", "128", "768", "5001", "20000"}) {
      const std::string c = cols;
      SCOPED_TRACE(std::string(rows) + "x" + c);
      if (std::string(rows) == "200" && c.size() > 3) continue;
      check_case({"f32[" + std::string(rows) + "," + c + "]", "f32[" + c + "]", "f32[" + c + "]"},
                 [](Builder& b, const Values& in) { return layer_norm(b, in[0], in[1], in[2]); }, -2, 2, {1e-4, 1e-4});
    }
}

// dx, dweight and dbias in one kernel: reductions over columns and over rows side by side.
TEST(Tile, LayerNormBackwardIsOneKernel) {
  for (const char* shape : {"[4,33]", "[500,128]", "[2,150,24]", "[3,5000]", "[2,40000]"}) {
    const TensorType type = parse_tensor_spec(std::string("f32") + shape);
    const std::string cols = std::to_string(type.shape.back());
    Dims row_shape = type.shape;
    row_shape.back() = 1;
    const std::string rows = "f32" + to_string(row_shape);
    SCOPED_TRACE(shape);
    check_case({to_string(type), to_string(type), "f32[" + cols + "]", rows, rows},
               [](Builder& b, const Values& in) {
                 const ValueId dy = in[0], x = in[1], weight = in[2], mean = in[3], scale = in[4];
                 const double count = static_cast<double>(b.type(x).shape.back());
                 const ValueId normal = b.mul(b.sub(x, mean), scale);
                 const ValueId g = b.mul(dy, weight);
                 const ValueId a = b.mul(b.sum(g, {-1}, true), 1.0 / count);
                 const ValueId c = b.mul(b.sum(b.mul(g, normal), {-1}, true), 1.0 / count);
                 Dims leading;
                 for (int64_t d = 0; d + 1 < b.type(x).rank(); ++d) leading.push_back(d);
                 return Values{b.mul(b.sub(b.sub(g, a), b.mul(normal, c)), scale), b.sum(b.mul(dy, normal), leading, false), b.sum(dy, leading, false)};
               },
               -1, 1, {3e-4, 1e-4});
  }
}

TEST(Tile, ReductionsOverAnyDims) {
  for (const Dims& dims : {Dims{0}, Dims{1}, Dims{2}, Dims{0, 1}, Dims{1, 2}, Dims{0, 2}, Dims{0, 1, 2}})
    for (bool keepdim : {false, true})
      for (const char* spec : {"f32[3,4,5]", "f32[70,1,129]", "f32[5,6,7]{stride=1,5,30}", "bf16[9,8,33]", "f32[2,3,9000]"}) {
        SCOPED_TRACE(std::string(spec) + " over " + to_string(dims));
        check_case({spec}, [&](Builder& b, const Values& in) { return Values{b.sum(b.mul(in[0], in[0]), dims, keepdim)}; }, -1, 1, {1e-4, 1e-5});
        check_case({spec}, [&](Builder& b, const Values& in) { return Values{b.amax(in[0], dims, keepdim)}; });
      }
}

TEST(Tile, ColumnSumsOfFewLongRows) {
  for (const char* spec : {"f32[3,20000]", "f32[17,40001]", "f32[9,70000]", "f32[16,3,30000]", "f32[1,100000]"}) {
    SCOPED_TRACE(spec);
    check_case({spec}, [](Builder& b, const Values& in) { return Values{b.sum(in[0], {0}, false), b.exp(in[0]), b.sum(b.mul(in[0], in[0]), {}, false)}; }, -1, 1, {1e-3, 1e-4});
  }
}

TEST(Tile, MeanOfRowLossesGoesOnAfterTheLoop) {
  check_case({"f32[300,40]", "f32[40]"}, [](Builder& b, const Values& in) {
    const ValueId row = b.sum(b.mul(in[0], in[1]), {1}, false);
    const ValueId total = b.sum(row, {0}, false);
    return Values{b.convert(b.mul(total, 1.0 / 300), DType::bf16), row};
  }, -1, 1, {1e-3, 1e-4});
  check_case({"f32[300,40]", "bf16[40]"}, [](Builder& b, const Values& in) {
    return Values{b.add(b.mul(b.sum(in[0], {0}, false), 0.5), in[1])};
  }, -1, 1, {1e-4, 1e-4});
}

TEST(Tile, ViewsOfInputsAreStrides) {
  check_case({"f32[6,8]"}, [](Builder& b, const Values& in) { return Values{b.neg(b.permute(in[0], {1, 0}))}; });
  check_case({"f32[700,333]"}, [](Builder& b, const Values& in) { return Values{b.exp(b.permute(in[0], {1, 0}))}; });
  check_case({"f32[333,3000]"}, [](Builder& b, const Values& in) { return Values{b.exp(b.permute(in[0], {1, 0}))}; });
  check_case({"f32[2,12,5]"}, [](Builder& b, const Values& in) { return Values{b.exp(b.slice(in[0], 1, 3, 11, 2))}; });
  check_case({"f32[2,3,4]", "f32[6,4]"}, [](Builder& b, const Values& in) { return Values{b.add(b.reshape(in[0], {6, 4}), in[1])}; });
  check_case({"f32[2,3,4]", "f32[6,4]"}, [](Builder& b, const Values& in) { return Values{b.mul(b.reshape(b.exp(in[0]), {6, 4}), in[1])}; });
  check_case({"f32[2,30,64]"}, [](Builder& b, const Values& in) {
    return Values{b.exp(b.permute(b.reshape(in[0], {2, 30, 4, 16}), {0, 2, 1, 3}))};
  });
  check_case({"f32[1,7]"}, [](Builder& b, const Values& in) { return Values{b.expand(b.neg(in[0]), {5, 7})}; });
  check_case({"f32[5,6]{stride=0,1}", "f32[5,6]"}, [](Builder& b, const Values& in) { return Values{b.mul(in[0], in[1])}; });
  check_case({"f32[5]"}, [](Builder& b, const Values& in) { return Values{b.sum(b.expand(in[0], {4, 5}), {0}, false)}; });
}

TEST(Tile, IntegersBoolsAndDoubles) {
  check_case({"i64[5,9]", "i64[9]"}, [](Builder& b, const Values& in) { return Values{b.add(b.mul(in[0], in[1]), in[0])}; });
  check_case({"i64[50]"}, [](Builder& b, const Values& in) { return Values{b.convert(in[0], DType::f32), b.convert(in[0], DType::boolean)}; });
  check_case({"u8[50]", "u8[50]"}, [](Builder& b, const Values& in) { return Values{b.mul(b.mul(in[0], in[1]), in[0])}; });
  check_case({"i32[7,3]"}, [](Builder& b, const Values& in) { return Values{b.sum(in[0], {1}, false)}; });
  check_case({"bool[7,30]"}, [](Builder& b, const Values& in) { return Values{b.sum(in[0], {1}, false)}; });
  check_case({"f64[33,31]", "f64[31]"}, [](Builder& b, const Values& in) { return Values{softmax(b, b.mul(in[0], in[1]))}; }, -2, 2, {1e-13, 1e-13});
  check_case({"i64[40]"}, [](Builder& b, const Values& in) { return Values{b.where(b.emit1("ne", {in[0], b.number(3, DType::i64)}), b.convert(in[0], DType::f32), b.number(-1.0, DType::f32))}; });
  check_case({"f32[40]"}, [](Builder& b, const Values& in) { return Values{b.convert(in[0], DType::i32), b.convert(in[0], DType::f64)}; });
}

TEST(Tile, ConstantPowersAndAttributes) {
  for (double power : {1.0, 2.0, 3.0, -1.0, 0.5, 2.5})
    check_case({"f32[3,40]"}, [&](Builder& b, const Values& in) { return Values{b.emit1("pow", {in[0], b.number(power, DType::f32)})}; }, 0.2, 3);
  check_case({"f32[3,40]"}, [](Builder& b, const Values& in) { return Values{b.emit1("clamp", {in[0]}, {{"min", -0.5}}), b.emit1("clamp", {in[0]}, {{"min", -0.5}, {"max", 0.25}})}; });
}

TEST(Tile, ManyValuesAndOutputs) {
  check_case({"f32[40,130]", "f32[40,130]", "f32[130]", "f32[40,1]"}, [](Builder& b, const Values& in) {
    Values all;
    ValueId x = in[0];
    for (int i = 0; i < 12; ++i) {
      x = b.add(b.mul(b.emit1("tanh", {x}), in[1]), i % 2 ? in[2] : in[3]);
      all.push_back(x);
    }
    for (ValueId v : Values(all)) x = b.add(x, b.mul(v, v));
    all.push_back(x);
    return all;
  }, -1, 1, {1e-4, 1e-5});
}

TEST(Tile, RowsMayBeAnyDims) {
  check_case({"f32[50,6]"}, [](Builder& b, const Values& in) { return Values{b.mul(in[0], b.sum(in[0], {0}, true))}; }, -1, 1, {1e-4, 1e-5});
}

TEST(Tile, RefusesWhatIsNotOneLoopNest) {
  EXPECT_NE(refusal_of({"f32[5,5]"}, [](Builder& b, const Values& in) {
    const ValueId x = b.exp(in[0]);
    return Values{b.add(x, b.permute(x, {1, 0}))};
  }), "");
  EXPECT_NE(refusal_of({"f32[5,6]"}, [](Builder& b, const Values& in) { return Values{b.mul(in[0], b.sum(in[0], {1}, true)), b.mul(in[0], b.sum(in[0], {0}, true))}; }), "");
  EXPECT_NE(refusal_of({"f32[0,6]"}, [](Builder& b, const Values& in) { return Values{b.exp(in[0])}; }), "");
}

// The same bits whatever the number of threads: items are cut by size alone.
TEST(Tile, SumsDontDependOnThreads) {
  const Trace trace = make_trace({"f32[3001,257]"}, [](Builder& b, const Values& in) {
    return Values{b.sum(in[0], {0}, false), b.sum(in[0], {0, 1}, false)};
  });
  auto compiled = compile_body(trace, chosen_isa());
  ASSERT_TRUE(std::holds_alternative<Program>(compiled)) << std::get<std::string>(compiled);
  const Program& program = std::get<Program>(compiled);
  std::mt19937 generator(3);
  std::vector<float> x(3001 * 257), first(258), again(258);
  for (float& v : x) v = static_cast<float>(std::uniform_real_distribution<double>(-1, 1)(generator));
  std::vector<unsigned char> workspace(static_cast<size_t>(program.workspace_bytes) + 64);
  const void* inputs[] = {x.data()};
  void* space = workspace.data() + (64 - reinterpret_cast<uintptr_t>(workspace.data()) % 64) % 64;
  for (int threads : {1, 2, 3, 5}) {
    set_thread_count(threads);
    void* outputs[] = {again.data(), again.data() + 257};
    run(program, inputs, outputs, space);
    if (threads == 1) first = again;
    EXPECT_EQ(std::memcmp(first.data(), again.data(), 258 * sizeof(float)), 0) << threads;
  }
  set_thread_count(0);
}

}  // namespace
}  // namespace fulmen::cpu::tile::testing
