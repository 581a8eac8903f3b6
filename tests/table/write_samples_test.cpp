// Writes every sample of the op table with the evaluator's results to the file that FULMEN_SAMPLE_FILE names, one JSON
// object a line, for tests/python/test_torch_oracle.py, which compares them with PyTorch. Without the variable it does
// nothing.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>

#include "executors/reference/evaluate.h"
#include "tests/table/sample_call.h"

namespace fulmen::table {
namespace {

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += c;
  }
  return out + '"';
}

std::string number_text(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "Infinity" : "-Infinity";
  char buffer[40];
  std::snprintf(buffer, sizeof(buffer), "%.17g", value);
  return buffer;
}

std::string attribute_text(const AttrValue& value) {
  if (std::holds_alternative<std::monostate>(value)) return "null";
  if (const auto* number = std::get_if<double>(&value)) return number_text(*number);
  if (const auto* dtype = std::get_if<DType>(&value)) return "{\"dtype\":" + quoted(std::string(dtype_name(*dtype))) + "}";
  return to_string(value);
}

std::string tensor_text(const HostTensor& tensor) {
  std::string out = "{\"dtype\":" + quoted(std::string(dtype_name(tensor.type.dtype))) + ",\"shape\":" + to_string(tensor.type.shape) + ",\"data\":[";
  for (int64_t k = 0; k < tensor.type.element_count(); ++k) {
    if (k) out += ',';
    out += is_float(tensor.type.dtype) ? number_text(tensor.f[static_cast<size_t>(k)]) : std::to_string(tensor.i[static_cast<size_t>(k)]);
  }
  return out + "]}";
}

template <class Items, class Text>
std::string list_text(const Items& items, Text&& text) {
  std::string out = "[";
  for (const auto& item : items) out += (out.size() > 1 ? "," : "") + text(item);
  return out + "]";
}

TEST(OpTable, WritesSamplesForTheTorchOracle) {
  const char* path = std::getenv("FULMEN_SAMPLE_FILE");
  if (!path) GTEST_SKIP() << "FULMEN_SAMPLE_FILE isn't set";
  std::ofstream file(path);
  ASSERT_TRUE(file) << path;
  for (const SampleCall& call : all_sample_calls()) {
    const Trace trace = trace_of(*call.op, *call.sample, Marks::none);
    const auto values = values_of(*call.op, *call.sample, trace);
    const Node& node = trace.nodes[0];
    std::vector<std::string> inputs;
    size_t next = 0;
    for (ValueId id : node.inputs) inputs.push_back(id == no_value ? "null" : tensor_text(values[next++]));
    const auto as_is = [](const std::string& text) { return text; };
    file << "{\"op\":" << quoted(call.op->name) << ",\"sample\":" << quoted(call.sample->name)
         << ",\"torch\":" << list_text(call.op->torch, quoted) << ",\"inputs\":" << list_text(inputs, as_is)
         << ",\"attributes\":" << list_text(call.op->attributes, [&](const AttrDef& def) {
              return "[" + quoted(def.name) + "," + attribute_text(*node.attrs.find(def.name)) + "]";
            })
         << ",\"outputs\":" << list_text(evaluate(trace, values), tensor_text) << "}\n";
  }
  ASSERT_TRUE(file.good());
}

}  // namespace
}  // namespace fulmen::table
