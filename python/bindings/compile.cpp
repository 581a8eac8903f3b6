// compile(): a trace to a program that runs on tensors, with the record of how it came to be.
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>
#include <nanobind/stl/tuple.h>

#include "bindings.h"
#include "compiled.h"
#include "runtime/profile.h"

namespace fulmen::python {
namespace {

Device device_of(const Trace& trace) {
  for (ValueId id : trace.inputs)
    if (trace.type(id).device.kind == DeviceKind::cuda) return trace.type(id).device;
  return {};
}

nb::object to_python(Compiled::Results results) {
  nb::list outputs;
  for (nb::object& output : results.outputs) outputs.append(std::move(output));
  nb::object saved = results.saved ? nb::cast(results.saved.release(), nb::rv_policy::take_ownership) : nb::object(nb::none());
  return nb::make_tuple(outputs, saved);
}

std::string profile_text(const Program& program) {
  std::string text;
  for (const Instruction& instruction : program.instructions()) text += instruction.executor + "  " + instruction.text + "\n";
  return text;
}

}  // namespace

void bind_compile(nb::module_& m) {
  nb::class_<Profile::Row>(m, "ProfileRow", "Calls and total time of one instruction")
      .def_ro("executor", &Profile::Row::executor)
      .def_ro("op", &Profile::Row::op)
      .def_ro("node", &Profile::Row::text)
      .def_ro("calls", &Profile::Row::calls)
      .def_ro("ms", &Profile::Row::ms);
  nb::class_<Profile>(m, "Profile", "Times of all programs' instructions between start() and stop()")
      .def(nb::init<>())
      .def("start", [](Profile& self) { set_active_profile(&self); })
      .def("stop", [](Profile&) { set_active_profile(nullptr); })
      .def("rows", &Profile::rows);

  nb::class_<Stage>(m, "Stage", "One stage of compiling")
      .def_ro("name", &Stage::name)
      .def_ro("ms", &Stage::ms)
      .def_ro("text", &Stage::text);
  nb::class_<ClaimRecord>(m, "ClaimRecord", "Who was asked for one node and what each answered")
      .def_ro("node", &ClaimRecord::node)
      .def_ro("op", &ClaimRecord::op)
      .def_ro("executor", &ClaimRecord::executor)
      .def_ro("kernel", &ClaimRecord::kernel)
      .def_ro("direction", &ClaimRecord::direction)
      .def_prop_ro("refusals", [](const ClaimRecord& record) {
        std::vector<Answer> answers;
        for (const auto& [executor, refusal] : record.refusals) {
          Answer answer;
          answer.executor = executor;
          answer.code = code_name(refusal.code);
          answer.reason = refusal.reason;
          answers.push_back(std::move(answer));
        }
        return answers;
      });
  nb::class_<Saved>(m, "Saved", "What a forward keeps for its backward")
      .def_ro("released", &Saved::released)
      .def("release", &Saved::release);

  nb::class_<Compiled>(m, "Compiled", "A compiled trace")
      .def(
          "forward",
          [](const Compiled& self, nb::handle inputs, bool keep_inputs) {
            return to_python(self.forward(items_of(inputs, "inputs"), keep_inputs));
          },
          nb::arg("inputs"), nb::arg("keep_inputs") = true,
          "(outputs, saved): saved is None without training. With keep_inputs=False the caller keeps the inputs of "
          "backward_saved_inputs and passes them to backward.")
      .def(
          "backward",
          [](const Compiled& self, Saved& saved, nb::handle grads, nb::handle inputs, bool release) {
            std::vector<nb::object> results =
                self.backward(saved, items_of(grads, "grads"), inputs.is_none() ? std::span<PyObject* const>() : items_of(inputs, "inputs"));
            if (release) saved.release();
            nb::list list;
            for (nb::object& result : results) list.append(std::move(result));
            return list;
          },
          nb::arg("saved"), nb::arg("grads"), nb::arg("inputs").none() = nb::none(), nb::arg("release") = false,
          "One gradient for each output of the trace (None: zero) to one for each input (None: not asked for). With "
          "release=True the saved values go back to the pool.")
      .def_prop_ro("output_count", [](const Compiled& c) { return c.trace().output_count; })
      .def_prop_ro("input_types", [](const Compiled& c) { return c.trace().forward.inputs(); })
      .def_prop_ro("output_types",
                   [](const Compiled& c) {
                     const auto& types = c.trace().forward.outputs();
                     return std::vector<TensorType>(types.begin(), types.begin() + c.trace().output_count);
                   })
      .def_prop_ro("grad_outputs", [](const Compiled& c) { return c.trace().grad_outputs; })
      .def_prop_ro("inputs_with_grad", [](const Compiled& c) { return c.trace().inputs_with_grad; })
      .def_prop_ro("backward_saved_inputs", [](const Compiled& c) { return c.trace().backward_saved_inputs; })
      .def_prop_ro("stages", [](const Compiled& c) { return c.trace().stages; })
      .def_prop_ro("claims", [](const Compiled& c) { return c.trace().claims; })
      .def_prop_ro("saved_bytes", [](const Compiled& c) { return c.trace().saved_bytes; })
      .def_prop_ro("arena_bytes",
                   [](const Compiled& c) {
                     const size_t back = c.trace().backward ? c.trace().backward->arena_bytes() : 0;
                     return std::max(c.trace().forward.arena_bytes(), back);
                   })
      .def_prop_ro("has_backward", [](const Compiled& c) { return c.trace().backward.has_value(); })
      .def_prop_ro("forward_text", [](const Compiled& c) { return profile_text(c.trace().forward); })
      .def_prop_ro("backward_text", [](const Compiled& c) { return c.trace().backward ? profile_text(*c.trace().backward) : std::string(); })
      .def_prop_ro("target", [](const Compiled& c) { return c.target(); });

  m.def(
      "compile",
      [](const Trace& trace, nb::handle executors, bool training, bool deterministic, std::vector<std::string> skip_passes,
         bool keep_texts, nb::handle target) {
        CompileOptions options;
        options.executors = executors_of(executors);
        options.target = target_of(target, device_of(trace));
        options.training = training;
        options.deterministic = deterministic;
        options.skip_passes = std::move(skip_passes);
        options.keep_texts = keep_texts;
        return std::make_unique<Compiled>(compile_trace(trace, options), options.target);
      },
      nb::arg("trace"), nb::arg("executors").none() = nb::none(), nb::arg("training") = false, nb::arg("deterministic") = false,
      nb::arg("skip_passes") = std::vector<std::string>(), nb::arg("keep_texts") = false, nb::arg("target").none() = nb::none());
}

}  // namespace fulmen::python
