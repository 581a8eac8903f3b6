#include "ir/print.h"

namespace fulmen {
namespace {

std::string value_text(const Trace& trace, ValueId id) { return id == no_value ? "none" : trace.value(id).name; }

// Device and number marks are part of the type: f32[2]@cuda:0, i64[]number
std::string type_text(const TensorType& type) {
  std::string text = to_string(type);
  if (type.device.kind != DeviceKind::cpu) text += "@" + to_string(type.device);
  if (type.is_number) text += " number";
  return text;
}

void print_trace(const Trace& trace, const std::string& indent, std::string& out);

void print_node(const Trace& trace, const Node& node, const std::string& indent, std::string& out) {
  const auto result = [&](ValueId id) { return id == no_value ? std::string("_") : trace.value(id).name + ": " + type_text(trace.type(id)); };
  out += indent;
  if (node.outputs.size() == 1) {
    out += result(node.outputs[0]);
  } else {
    out += '(';
    for (size_t i = 0; i < node.outputs.size(); ++i) out += (i ? ", " : "") + result(node.outputs[i]);
    out += ')';
  }
  out += " = " + node.op->name + "(";
  bool first = true;
  for (ValueId id : node.inputs) {
    out += (first ? "" : ", ") + value_text(trace, id);
    first = false;
  }
  for (const auto& [name, value] : node.attrs) {
    out += (first ? "" : ", ") + name + "=" + to_string(value);
    first = false;
  }
  out += ')';
  if (!node.executor.empty()) out += " @" + node.executor;
  if (node.body) {
    out += " ";
    print_trace(*node.body, indent, out);
  }
  out += '\n';
}

void print_trace(const Trace& trace, const std::string& indent, std::string& out) {
  out += "trace " + trace.name + "(";
  for (size_t i = 0; i < trace.inputs.size(); ++i) {
    const Value& value = trace.value(trace.inputs[i]);
    out += (i ? ", " : "") + value.name + ": " + type_text(value.type);
  }
  out += ") {\n";
  for (const Node& node : trace.nodes) print_node(trace, node, indent + "  ", out);
  out += indent + "  return";
  for (size_t i = 0; i < trace.outputs.size(); ++i) out += (i ? ", " : " ") + value_text(trace, trace.outputs[i]);
  out += '\n' + indent + '}';
}

}  // namespace

std::string to_string(const Trace& trace) {
  std::string out;
  print_trace(trace, "", out);
  return out + "\n";
}

std::string to_string(const Trace& trace, const Node& node) {
  std::string out;
  print_node(trace, node, "", out);
  if (!out.empty()) out.pop_back();
  return out;
}

}  // namespace fulmen
