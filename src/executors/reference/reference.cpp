#include "executors/reference/reference.h"

#include "executors/reference/evaluate.h"
#include "executors/reference/host_memory.h"

namespace fulmen::reference {
namespace {

// Runs a call as a trace of one node; reads and writes memory as the call's types say.
class ReferenceKernel final : public Kernel {
 public:
  explicit ReferenceKernel(const Call& call) {
    node_.op = call.op;
    node_.attrs = *call.attrs;
    if (call.body) node_.body = std::make_shared<const Trace>(*call.body);
    for (const TensorType* type : call.inputs) node_.inputs.push_back(type ? trace_.add_input(*type) : no_value);
    for (const TensorType* type : call.outputs) node_.outputs.push_back(type ? trace_.add_value(*type) : no_value);
  }

  void run(const RunContext&, const void* const* inputs, void* const* outputs) const override {
    std::vector<HostTensor> loaded(node_.inputs.size());
    std::vector<const HostTensor*> operands(node_.inputs.size(), nullptr);
    for (size_t i = 0; i < node_.inputs.size(); ++i) {
      if (node_.inputs[i] == no_value) continue;
      loaded[i] = load(trace_.type(node_.inputs[i]), inputs[i]);
      operands[i] = &loaded[i];
    }
    const auto results = evaluate_node(trace_, node_, operands, {.round = true});
    for (size_t i = 0; i < node_.outputs.size(); ++i)
      if (node_.outputs[i] != no_value) store(results[i], trace_.type(node_.outputs[i]), outputs[i]);
  }

 private:
  Trace trace_;
  Node node_;
};

class ReferenceExecutor final : public Executor {
 public:
  std::string_view name() const override { return "reference"; }
  std::string_view doc() const override {
    return "Plain loops in float64 over every primitive of the catalogue, on the CPU, in any dtype and layout. Slow; stands last.";
  }

  Claim claim(const Call& call, const Target& target) const override {
    const std::string& op = call.op->name;
    if (target.kind != DeviceKind::cpu)
      return Refusal{RefusalCode::wrong_device, op + ": target is " + target.name + ", reference runs on the CPU"};
    if (!call.body && !call.op->is_primitive())
      return Refusal{RefusalCode::not_implemented, op + ": it is a composite, reference takes primitives and its decomposition is made of them"};
    Plan plan;
    plan.forward.kernel = "reference " + op;
    return plan;
  }

  std::unique_ptr<Kernel> make_kernel(const Call& call, const Plan&, const Target&) const override {
    return std::make_unique<ReferenceKernel>(call);
  }
};

}  // namespace

std::shared_ptr<const Executor> make_reference_executor() { return std::make_shared<ReferenceExecutor>(); }

}  // namespace fulmen::reference
