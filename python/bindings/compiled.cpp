#include "compiled.h"

#include <unistd.h>

#include <atomic>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "core/error.h"
#include "core/half.h"
#include "ir/print.h"

namespace fulmen::python {
namespace {

std::atomic<Profile*> active_profile{nullptr};

bool same_layout(const TensorView& view, const TensorType& type) {
  for (int i = 0; i < view.rank; ++i)
    if (view.shape[i] > 1 && view.strides[i] != type.strides[static_cast<size_t>(i)]) return false;
  return true;
}

void check_type(const TensorView& view, const TensorType& type, const char* what, size_t index) {
  bool same = view.dtype == type.dtype && view.rank == type.rank() && view.device == type.device;
  for (int i = 0; same && i < view.rank; ++i) same = view.shape[i] == type.shape[static_cast<size_t>(i)];
  if (same) return;
  const std::string message = "compiled program: " + std::string(what) + " " + std::to_string(index) + " is " +
                              to_string(view.type()) + " on " + to_string(view.device) + ", the program was compiled for " +
                              to_string(type) + " on " + to_string(type.device);
  if (view.dtype != type.dtype || view.device != type.device) throw TypeError(message);
  throw ShapeError(message);
}

void store_number(double value, int64_t integer, DType dtype, void* to) {
  switch (dtype) {
    case DType::boolean:
    case DType::u8: *static_cast<uint8_t*>(to) = static_cast<uint8_t>(integer); break;
    case DType::i8: *static_cast<int8_t*>(to) = static_cast<int8_t>(integer); break;
    case DType::i16: *static_cast<int16_t*>(to) = static_cast<int16_t>(integer); break;
    case DType::i32: *static_cast<int32_t*>(to) = static_cast<int32_t>(integer); break;
    case DType::i64: *static_cast<int64_t*>(to) = integer; break;
    case DType::f16: *static_cast<f16*>(to) = f16(static_cast<float>(value)); break;
    case DType::bf16: *static_cast<bf16*>(to) = bf16(static_cast<float>(value)); break;
    case DType::f32: *static_cast<float*>(to) = static_cast<float>(value); break;
    case DType::f64: *static_cast<double*>(to) = value; break;
  }
}

}  // namespace

void set_active_profile(Profile* profile) { active_profile.store(profile); }

std::shared_ptr<const CompiledTrace> compile_trace(const Trace& trace, const CompileOptions& options) {
  nb::gil_scoped_release unlocked;
  try {
    return compile(trace, options);
  } catch (const InternalError& error) {
    static std::atomic<int> count{0};
    std::error_code failed;
    const auto folder = std::filesystem::temp_directory_path(failed);
    const auto path = folder / ("fulmen-" + std::to_string(getpid()) + "-" + std::to_string(count++) + ".trace");
    std::ofstream file(path);
    std::istringstream lines(error.what());
    for (std::string line; std::getline(lines, line);) file << "# " << line << "\n";
    file << "# compiled " << (options.training ? "for training" : "for inference") << (options.deterministic ? ", deterministic" : "") << ", by";
    for (const auto& executor : options.executors) file << " " << executor->name();
    for (const std::string& pass : options.skip_passes) file << ", without " << pass;
    file << "\n" << to_string(trace);
    file.close();
    if (failed || !file) throw;  // the report is worth less than the error itself
    throw InternalError(std::string(error.what()) + "\nthe trace is in " + path.string() + "; `fulmen run` replays it");
  }
}

std::span<PyObject* const> items_of(nb::handle sequence, const char* what) {
  if (PyList_Check(sequence.ptr()) || PyTuple_Check(sequence.ptr()))
    return {PySequence_Fast_ITEMS(sequence.ptr()), static_cast<size_t>(PySequence_Fast_GET_SIZE(sequence.ptr()))};
  throw TypeError(std::string(what) + ": a list or tuple is needed, found " + Py_TYPE(sequence.ptr())->tp_name);
}

PyObject* tuple_of(std::vector<nb::object>& objects) {
  PyObject* tuple = PyTuple_New(static_cast<Py_ssize_t>(objects.size()));
  if (!tuple) throw nb::python_error();
  for (size_t i = 0; i < objects.size(); ++i)
    PyTuple_SET_ITEM(tuple, static_cast<Py_ssize_t>(i), objects[i].is_valid() ? objects[i].release().ptr() : Py_NewRef(Py_None));
  return tuple;
}

void Saved::release() {
  host = PoolBuffer();
  device = DeviceMemory();
  inputs.clear();
  released = true;
}

// The pointers of one run, with everything that must live until it ends.
struct Compiled::Arguments {
  TensorReader reader;
  std::vector<const void*> pointers;
  std::vector<PoolBuffer> copies;
  std::vector<nb::object> objects;
  std::vector<std::unique_ptr<uint64_t>> numbers;
  const Framework* framework = nullptr;

  void add(PyObject* object, const TensorType& type, const char* what, size_t index) {
    if (PyFloat_Check(object) || PyLong_Check(object)) {
      if (type.rank() != 0 || type.device.kind != DeviceKind::cpu)
        throw TypeError("compiled program: " + std::string(what) + " " + std::to_string(index) + " is a number, the program was compiled for " + to_string(type));
      const bool real = PyFloat_Check(object);
      const double value = PyFloat_AsDouble(object);
      const int64_t integer = real ? static_cast<int64_t>(value) : PyLong_AsLongLong(object);
      if (PyErr_Occurred()) throw nb::python_error();
      numbers.push_back(std::make_unique<uint64_t>(0));
      store_number(value, integer, type.dtype, numbers.back().get());
      pointers.push_back(numbers.back().get());
      return;
    }
    const TensorView view = reader.read(object, what);
    if (!framework) framework = &framework_of(object);
    check_type(view, type, what, index);
    if (same_layout(view, type)) {
      pointers.push_back(view.data);
    } else if (type.device.kind == DeviceKind::cpu) {
      copies.emplace_back(static_cast<size_t>(span_elements(type.shape, type.strides)) * dtype_bytes(type.dtype));
      copy_strided(view, copies.back().data(), type.strides.data());
      pointers.push_back(copies.back().data());
    } else {
      const NewTensor made = make_tensor(framework_of(object), type);
      objects.push_back(nb::steal(made.object));
      if (!nb::hasattr(objects.back(), "copy_"))
        throw ShapeError("compiled program: " + std::string(what) + " " + std::to_string(index) + " has strides " +
                         to_string(view.type().strides) + ", the program was compiled for " + to_string(type.strides));
      objects.back().attr("copy_")(nb::borrow(object).attr("detach")());
      pointers.push_back(made.data);
    }
  }
};

Compiled::Compiled(std::shared_ptr<const CompiledTrace> trace, Target target) : trace_(std::move(trace)), target_(std::move(target)) {
  for (int output : trace_->saved_from_output)
    if (output >= 0) saved_outputs_.push_back(output);
  const std::vector<TensorType>& outputs = trace_->forward.outputs();
  for (size_t i = static_cast<size_t>(trace_->output_count); i < outputs.size(); ++i) {
    saved_offsets_.push_back(saved_bytes_);
    const size_t bytes = static_cast<size_t>(span_elements(outputs[i].shape, outputs[i].strides)) * dtype_bytes(outputs[i].dtype);
    saved_bytes_ += (bytes + BufferPool::alignment - 1) / BufferPool::alignment * BufferPool::alignment;
  }
}

void Compiled::run(const Program& program, const Framework& framework, const void* const* inputs, void* const* outputs) const {
  const Device device{target_.kind, target_.device_index};
  RunContext context;
  context.device_index = device.index;
  context.stream = current_stream(framework, device);
  PoolBuffer host;
  DeviceMemory memory;
  void* arena = nullptr;
  if (program.arena_bytes() > 0) {
    if (device.kind == DeviceKind::cpu) {
      host = PoolBuffer(program.arena_bytes());
      arena = host.data();
    } else {
      memory = DeviceMemory(framework, device, program.arena_bytes());
      arena = memory.data();
    }
  }
  const RunningFramework running(framework);
  nb::gil_scoped_release unlocked;
  program.run(context, inputs, outputs, arena, active_profile.load(std::memory_order_relaxed));
}

Compiled::Results Compiled::run_forward(const Framework& framework, const void* const* inputs, std::span<PyObject* const> objects,
                                        bool keep_inputs) const {
  const Program& program = trace_->forward;
  Results results;
  void* fixed[16];
  std::vector<void*> many;
  const size_t total = program.outputs().size();
  void** outputs = fixed;
  if (total > 16) {
    many.resize(total);
    outputs = many.data();
  }
  const size_t count = static_cast<size_t>(trace_->output_count);
  results.outputs.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    const NewTensor made = make_tensor(framework, program.outputs()[i]);
    results.outputs.push_back(nb::steal(made.object));
    outputs[i] = made.data;
  }
  if (trace_->backward) {
    results.saved = std::make_unique<Saved>();
    results.saved->trace = trace_;
    if (saved_bytes_ > 0) {
      if (target_.kind == DeviceKind::cpu) results.saved->host = PoolBuffer(saved_bytes_);
      else results.saved->device = DeviceMemory(framework, {target_.kind, target_.device_index}, saved_bytes_);
    }
    for (size_t i = count; i < total; ++i) outputs[i] = results.saved->data() + saved_offsets_[i - count];
    if (keep_inputs) {
      for (int index : trace_->backward_saved_inputs) results.saved->inputs.push_back(nb::borrow(objects[static_cast<size_t>(index)]));
      for (int index : saved_outputs_) results.saved->inputs.push_back(results.outputs[static_cast<size_t>(index)]);
    }
  }
  run(program, framework, inputs, outputs);
  return results;
}

Compiled::Results Compiled::forward(std::span<PyObject* const> inputs, bool keep_inputs) const {
  const std::vector<TensorType>& types = trace_->forward.inputs();
  if (inputs.size() != types.size())
    throw ShapeError("compiled program: " + std::to_string(inputs.size()) + " inputs given, the program takes " + std::to_string(types.size()));
  Arguments arguments;
  arguments.pointers.reserve(types.size());
  for (size_t i = 0; i < types.size(); ++i) arguments.add(inputs[i], types[i], "input", i);
  const Framework& framework = arguments.framework ? *arguments.framework : default_framework();
  return run_forward(framework, arguments.pointers.data(), inputs, keep_inputs);
}

Compiled::Results Compiled::forward_unchecked(const Framework& framework, std::span<const TensorView> views,
                                              std::span<PyObject* const> objects, bool keep_inputs) const {
  const void* pointers[16];
  FULMEN_CHECK(views.size() <= 16 && views.size() == trace_->forward.inputs().size());
  for (size_t i = 0; i < views.size(); ++i) pointers[i] = views[i].data;
  return run_forward(framework, pointers, objects, keep_inputs);
}

std::vector<nb::object> Compiled::backward(const Saved& saved, std::span<PyObject* const> output_grads,
                                           std::span<PyObject* const> inputs, const Program* other) const {
  if (!trace_->backward)
    throw UnsupportedError("compiled program: backward was asked of a program compiled without training");
  if (saved.released)
    throw UnsupportedError("compiled program: backward ran already and its saved values were given back; ask for retain_graph=True to run it twice");
  if (saved.trace != trace_) throw TypeError("compiled program: the saved values are of another program");
  if (output_grads.size() != static_cast<size_t>(trace_->output_count))
    throw ShapeError("compiled program: " + std::to_string(output_grads.size()) + " output gradients given, the program has " +
                     std::to_string(trace_->output_count) + " outputs");
  const Program& program = other ? *other : *trace_->backward;
  const std::vector<TensorType>& types = program.inputs();
  Arguments arguments;
  arguments.pointers.reserve(types.size());
  const size_t input_count = trace_->backward_saved_inputs.size(), kept_count = input_count + saved_outputs_.size();
  if (saved.inputs.size() != kept_count && inputs.size() != kept_count)
    throw ShapeError("compiled program: the backward reads " + std::to_string(kept_count) + " tensors of the forward, " +
                     std::to_string(inputs.size()) + " given");
  const auto kept = [&](size_t i) { return inputs.empty() ? saved.inputs[i].ptr() : inputs[i]; };
  for (size_t i = 0; i < input_count; ++i) arguments.add(kept(i), types[i], "saved input", i);
  size_t next_kept = input_count, next_offset = 0;
  for (int output : trace_->saved_from_output) {
    if (output >= 0) arguments.add(kept(next_kept++), types[arguments.pointers.size()], "saved result", static_cast<size_t>(output));
    else arguments.pointers.push_back(saved.data() + saved_offsets_[next_offset++]);
  }
  for (int output : trace_->grad_outputs) {
    const TensorType& type = types[arguments.pointers.size()];
    PyObject* grad = output_grads[static_cast<size_t>(output)];
    if (grad != Py_None) {
      arguments.add(grad, type, "gradient of output", static_cast<size_t>(output));
      continue;
    }
    if (type.device.kind != DeviceKind::cpu)
      throw TypeError("compiled program: no gradient given for output " + std::to_string(output) + "; on a device it must be a tensor of zeros");
    const size_t bytes = static_cast<size_t>(span_elements(type.shape, type.strides)) * dtype_bytes(type.dtype);
    arguments.copies.emplace_back(bytes);
    std::memset(arguments.copies.back().data(), 0, bytes);
    arguments.pointers.push_back(arguments.copies.back().data());
  }
  const Framework& framework = arguments.framework ? *arguments.framework : default_framework();
  std::vector<nb::object> results(trace_->forward.inputs().size());
  for (nb::object& result : results) result = nb::none();
  std::vector<void*> outputs;
  outputs.reserve(program.outputs().size());
  for (size_t i = 0; i < program.outputs().size(); ++i) {
    const NewTensor made = make_tensor(framework, program.outputs()[i]);
    results[static_cast<size_t>(trace_->inputs_with_grad[i])] = nb::steal(made.object);
    outputs.push_back(made.data);
  }
  run(program, framework, arguments.pointers.data(), outputs.data());
  return results;
}

}  // namespace fulmen::python
