#include "ops/rebuild.h"

#include "ir/print.h"
#include "ops/builder.h"

namespace fulmen {
namespace {

void rebuild_nodes(const Trace& parsed, std::vector<ValueId>& made, Builder& builder) {
  const auto mapped = [&](const std::vector<ValueId>& ids) {
    std::vector<ValueId> result;
    for (ValueId id : ids) result.push_back(id == no_value ? no_value : made[static_cast<size_t>(id)]);
    return result;
  };
  for (const Node& node : parsed.nodes) {
    const auto fail = [&](const std::string& what) { throw ShapeError("trace: " + what + " in\n  " + to_string(parsed, node)); };
    std::vector<ValueId> results;
    if (node.body) {
      const Trace& body = *node.body;
      const std::vector<ValueId> operands = mapped(node.inputs);
      if (body.inputs.size() != operands.size()) fail("a fusion has " + std::to_string(operands.size()) + " operands, its body takes " + std::to_string(body.inputs.size()));
      std::vector<ValueId> inside(body.values.size(), no_value);
      for (size_t i = 0; i < operands.size(); ++i) {
        if (operands[i] == no_value) fail("an operand of a fusion is none");
        const TensorType &given = builder.trace().type(operands[i]), &needed = body.type(body.inputs[i]);
        if (given.shape != needed.shape || given.dtype != needed.dtype) fail("operand " + std::to_string(i) + " is " + to_string(given) + ", the fusion's body takes " + to_string(needed));
        inside[static_cast<size_t>(body.inputs[i])] = operands[i];
      }
      rebuild_nodes(body, inside, builder);
      for (ValueId id : body.outputs) results.push_back(id == no_value ? no_value : inside[static_cast<size_t>(id)]);
    } else {
      try {
        results = builder.emit(node.op->name, mapped(node.inputs), node.attrs);
      } catch (const ShapeError& error) {
        throw ShapeError(std::string(error.what()) + "\n  in " + to_string(parsed, node));
      } catch (const TypeError& error) {
        throw TypeError(std::string(error.what()) + "\n  in " + to_string(parsed, node));
      }
    }
    if (results.size() != node.outputs.size())
      fail(node.op->name + " gives " + std::to_string(results.size()) + " results, " + std::to_string(node.outputs.size()) + " are declared");
    for (size_t i = 0; i < results.size(); ++i) {
      if (node.outputs[i] == no_value) {
        if (!node.body) builder.trace().nodes.back().outputs[i] = no_value;
        continue;
      }
      if (results[i] == no_value) fail("result " + std::to_string(i) + " is none in the body");
      const TensorType& declared = parsed.type(node.outputs[i]);
      TensorType& given = builder.trace().value(results[i]).type;
      if (given.shape != declared.shape || given.dtype != declared.dtype)
        fail("result " + std::to_string(i) + " is declared as " + to_string(declared) + ", " + node.op->name + " gives " + to_string(given));
      given.is_number = declared.is_number;
      made[static_cast<size_t>(node.outputs[i])] = results[i];
    }
  }
}

}  // namespace

Trace rebuild(const Trace& parsed) {
  Trace trace;
  trace.name = parsed.name;
  Builder builder(trace);
  std::vector<ValueId> made(parsed.values.size(), no_value);
  for (ValueId id : parsed.inputs) made[static_cast<size_t>(id)] = trace.add_input(parsed.type(id), parsed.value(id).name);
  rebuild_nodes(parsed, made, builder);
  for (ValueId id : parsed.outputs)
    if (id != no_value) trace.outputs.push_back(made[static_cast<size_t>(id)]);
  return trace;
}

}  // namespace fulmen
