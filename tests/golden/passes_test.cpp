// Runs every file of tests/golden/passes: a pass by name, the trace before and the trace after. To accept a new result
// after reading it: FULMEN_UPDATE_GOLDEN=1 build/fulmen_tests --gtest_filter='Golden/Passes*'.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>

#include "executors/reference/reference.h"
#include "ir/parse.h"
#include "ir/print.h"
#include "ir/verify.h"
#include "ops/table.h"
#include "passes/alias_views.h"
#include "passes/bring_attention_to_four_dims.h"
#include "passes/claim_nodes.h"
#include "passes/decompose.h"
#include "passes/differentiate.h"
#include "passes/join_slice_gradients.h"
#include "passes/merge_equal_nodes.h"
#include "passes/remove_dead_nodes.h"
#include "passes/simplify.h"
#include "passes/split.h"

namespace fulmen {
namespace {

std::string after_claims(const Trace& trace) {
  const ExecutorList list = {reference::make_reference_executor()};
  return to_string(claim_nodes(trace, list, Target{}, false, "forward", nullptr));
}

std::string after_split(const Trace& trace) {
  const SplitTrace halves = split(differentiate(trace));
  return to_string(halves.forward) + to_string(halves.backward) + "# saved bytes: " + std::to_string(halves.saved_bytes) + "\n";
}

const std::map<std::string, std::string (*)(const Trace&)> passes = {
    {"simplify", [](const Trace& t) { return to_string(simplify(t)); }},
    {"merge_equal_nodes", [](const Trace& t) { return to_string(merge_equal_nodes(t)); }},
    {"remove_dead_nodes", [](const Trace& t) { return to_string(remove_dead_nodes(t)); }},
    {"join_slice_gradients", [](const Trace& t) { return to_string(remove_dead_nodes(join_slice_gradients(t))); }},
    {"decompose", [](const Trace& t) { return to_string(decompose(t, [](const Trace&, const Node&) { return false; })); }},
    {"differentiate", [](const Trace& t) { return to_string(differentiate(t).trace); }},
    {"split", after_split},
    {"alias_views", [](const Trace& t) { return to_string(alias_views(t)); }},
    {"bring_attention_to_four_dims", [](const Trace& t) { return to_string(bring_attention_to_four_dims(t)); }},
    {"claim_nodes", after_claims},
};

std::filesystem::path folder() { return std::filesystem::path(FULMEN_SOURCE_DIR) / "tests/golden/passes"; }

class Passes : public testing::TestWithParam<std::string> {};

TEST_P(Passes, GivesTheGoldenResult) {
  const auto path = folder() / (GetParam() + ".txt");
  std::ifstream file(path);
  std::stringstream buffer;
  buffer << file.rdbuf();
  const std::string text = buffer.str();
  const std::string marker = "--- after\n";
  const size_t middle = text.find(marker), begin = text.find("--- before\n");
  ASSERT_TRUE(begin != std::string::npos && middle != std::string::npos) << path << " needs '--- before' and '--- after'";
  std::string name = text.substr(6, text.find('\n') - 6);  // "pass: NAME"
  ASSERT_TRUE(passes.count(name)) << "no pass named '" << name << "'";
  const Trace before = parse_trace(text.substr(begin + 11, middle - begin - 11), [](std::string_view op) { return find_op(op); });
  const std::string found = passes.at(name)(before);
  if (std::getenv("FULMEN_UPDATE_GOLDEN")) {
    std::ofstream(path) << text.substr(0, middle) << marker << found;
    return;
  }
  EXPECT_EQ(found, text.substr(middle + marker.size())) << "re-run: fulmen_tests --gtest_filter='Golden/Passes*/" << GetParam() << "'";
}

std::vector<std::string> golden_names() {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder())) names.push_back(entry.path().stem());
  std::sort(names.begin(), names.end());
  return names;
}

INSTANTIATE_TEST_SUITE_P(Golden, Passes, testing::ValuesIn(golden_names()), [](const auto& info) { return info.param; });

TEST(Parse, PrintsBackTheSameText) {
  for (const std::string& name : golden_names()) {
    std::ifstream file(folder() / (name + ".txt"));
    std::stringstream buffer;
    buffer << file.rdbuf();
    const std::string text = buffer.str();
    const size_t begin = text.find("--- before\n") + 11;
    const auto lookup = [](std::string_view op) { return find_op(op); };
    const std::string once = to_string(parse_trace(text.substr(begin, text.find("--- after") - begin), lookup));
    EXPECT_EQ(once, to_string(parse_trace(once, lookup))) << name;
  }
}

TEST(Parse, NamesTheLineAndWhatIsNeeded) {
  const auto lookup = [](std::string_view op) { return find_op(op); };
  const auto message = [&](const std::string& text) -> std::string {
    try {
      parse_trace(text, lookup);
    } catch (const Error& error) {
      return error.what();
    }
    return "no error";
  };
  EXPECT_NE(message("trace f(x: f32[2]) {\n  t1: f32[2] = no_such_op(x)\n  return t1\n}").find("line 2"), std::string::npos);
  EXPECT_NE(message("trace f(x: f33[2]) {\n return x\n}").find("'f33' is not a dtype"), std::string::npos);
  EXPECT_NE(message("trace f(x: f32[2]) {\n  t1: f32[2] = neg(y)\n  return t1\n}").find("a value defined above"), std::string::npos);
  EXPECT_NE(message("trace f(x: f32[2]) {\n  t1: f32[2] = neg(t1)\n  return t1\n}").find("defined above this node"), std::string::npos);
  EXPECT_NE(message("").find("'trace'"), std::string::npos);
  EXPECT_NE(message("trace f(").find("line 1"), std::string::npos);
}

// Any prefix and any single changed byte is an error or a trace, never a crash.
TEST(Parse, SurvivesDamagedText) {
  const auto lookup = [](std::string_view op) { return find_op(op); };
  const std::string text =
      "trace f(x: f32[2,3]{stride=1,2}!, y: i64[]number) {\n  t2: f32[3]! = sum(x, dims=[0], keepdim=false)\n"
      "  t3: f32[3]! = mul(t2, y) @cpu\n  return t3, none\n}\n";
  ASSERT_NO_THROW(parse_trace(text, lookup));
  for (size_t i = 0; i <= text.size(); ++i) {
    for (int change = 0; change < 5; ++change) {
      std::string damaged = text;
      if (change == 0) damaged.resize(i);
      else if (i < text.size()) damaged[i] = "\0]x9{"[change];
      try {
        parse_trace(damaged, lookup);
      } catch (const Error&) {
      }
    }
  }
}

TEST(Verify, FindsWhatIsWrong) {
  const auto lookup = [](std::string_view op) { return find_op(op); };
  Trace trace = parse_trace("trace f(x: f32[2]) {\n  t1: f32[2] = neg(x)\n  t2: f32[2] = exp(t1)\n  return t2\n}", lookup);
  Trace swapped = trace;
  std::swap(swapped.nodes[0], swapped.nodes[1]);
  EXPECT_THROW(verify(swapped), InternalError);
  Trace twice = trace;
  twice.nodes.push_back(twice.nodes[0]);
  EXPECT_THROW(verify(twice), InternalError);
  Trace same_name = trace;
  same_name.values[1].name = "x";
  EXPECT_THROW(verify(same_name), InternalError);
  Trace far = trace;
  far.outputs[0] = 77;
  EXPECT_THROW(verify(far), InternalError);
}

}  // namespace
}  // namespace fulmen
