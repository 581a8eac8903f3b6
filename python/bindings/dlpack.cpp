#include "dlpack.h"

#include <algorithm>
#include <cstring>
#include <unordered_map>

#include "core/error.h"
#include "python_error.h"

namespace fulmen::python {

namespace nb = nanobind;

namespace {

std::optional<DType> dtype_of(dlpack::DataType dtype) {
  if (dtype.lanes != 1) return std::nullopt;
  switch (dtype.code) {
    case dlpack::code_bool: return dtype.bits == 8 ? std::optional(DType::boolean) : std::nullopt;
    case dlpack::code_uint: return dtype.bits == 8 ? std::optional(DType::u8) : std::nullopt;
    case dlpack::code_bfloat: return dtype.bits == 16 ? std::optional(DType::bf16) : std::nullopt;
    case dlpack::code_int:
      switch (dtype.bits) {
        case 8: return DType::i8;
        case 16: return DType::i16;
        case 32: return DType::i32;
        case 64: return DType::i64;
        default: return std::nullopt;
      }
    case dlpack::code_float:
      switch (dtype.bits) {
        case 16: return DType::f16;
        case 32: return DType::f32;
        case 64: return DType::f64;
        default: return std::nullopt;
      }
    default: return std::nullopt;
  }
}

dlpack::DataType dlpack_dtype(DType dtype) {
  const uint8_t bits = static_cast<uint8_t>(dtype_bytes(dtype) * 8);
  uint8_t code = dlpack::code_int;
  if (dtype == DType::boolean) code = dlpack::code_bool;
  else if (dtype == DType::u8) code = dlpack::code_uint;
  else if (dtype == DType::bf16) code = dlpack::code_bfloat;
  else if (is_float(dtype)) code = dlpack::code_float;
  return {code, bits, 1};
}

Device device_of(dlpack::DeviceId device, const char* what) {
  switch (device.type) {
    case dlpack::device_cpu:
    case dlpack::device_cuda_host: return {DeviceKind::cpu, 0};
    case dlpack::device_cuda:
    case dlpack::device_cuda_managed: return {DeviceKind::cuda, device.index};
    default:
      throw TypeError(std::string(what) + " is on a device of DLPack kind " + std::to_string(device.type) +
                      "; Fulmen runs on CPUs and CUDA devices");
  }
}

dlpack::DeviceId dlpack_device(Device device) {
  return device.kind == DeviceKind::cuda ? dlpack::DeviceId{dlpack::device_cuda, device.index}
                                         : dlpack::DeviceId{dlpack::device_cpu, 0};
}

void set_exchange_error(void* context, const char* kind, const char* message) {
  *static_cast<std::string*>(context) = std::string(kind) + ": " + message;
}

// Fills a view; strides that the producer left out are put in `strides`.
TensorView view_of(const dlpack::Tensor& tensor, const char* what, std::vector<std::unique_ptr<int64_t[]>>& strides) {
  const auto dtype = dtype_of(tensor.dtype);
  if (!dtype)
    throw TypeError(std::string(what) + " has a dtype of DLPack code " + std::to_string(tensor.dtype.code) + " and " +
                    std::to_string(tensor.dtype.bits) + " bits; Fulmen has bool u8 i8 i16 i32 i64 f16 bf16 f32 f64");
  TensorView view;
  view.dtype = *dtype;
  view.device = device_of(tensor.device, what);
  view.rank = tensor.rank;
  view.shape = tensor.shape;
  view.strides = tensor.strides;
  view.data = static_cast<char*>(tensor.data) + tensor.byte_offset;
  if (!view.strides && view.rank > 0) {
    auto made = std::make_unique<int64_t[]>(static_cast<size_t>(view.rank));
    int64_t stride = 1;
    for (int i = view.rank; i-- > 0;) {
      made[static_cast<size_t>(i)] = stride;
      stride *= view.shape[i] > 0 ? view.shape[i] : 1;
    }
    view.strides = made.get();
    strides.push_back(std::move(made));
  }
  return view;
}

// A tensor of ours that a framework will own: memory from the pool, or another framework's tensor under new dims.
struct OwnedTensor {
  dlpack::ManagedTensor managed{};
  BufferPool::Block block;
  dlpack::ManagedTensor* inner = nullptr;
  static constexpr size_t inline_dims = 12;
  int64_t dims[inline_dims];             // shape, then strides
  std::unique_ptr<int64_t[]> many_dims;  // of tensors of higher rank

  static void destroy(dlpack::ManagedTensor* self) {
    auto* owned = static_cast<OwnedTensor*>(self->context);
    if (owned->block.data) BufferPool::instance().give(owned->block);
    if (owned->inner && owned->inner->deleter) owned->inner->deleter(owned->inner);
    delete owned;
  }
};

std::unique_ptr<OwnedTensor> describe(const TensorType& type) {
  auto owned = std::make_unique<OwnedTensor>();
  const size_t rank = type.shape.size();
  int64_t* dims = owned->dims;
  if (2 * rank > OwnedTensor::inline_dims) {
    owned->many_dims = std::make_unique<int64_t[]>(2 * rank);
    dims = owned->many_dims.get();
  }
  std::copy(type.shape.begin(), type.shape.end(), dims);
  std::copy(type.strides.begin(), type.strides.end(), dims + rank);
  dlpack::ManagedTensor& managed = owned->managed;
  managed.version = dlpack::our_version;
  managed.context = owned.get();
  managed.deleter = OwnedTensor::destroy;
  managed.tensor.device = dlpack_device(type.device);
  managed.tensor.rank = type.rank();
  managed.tensor.dtype = dlpack_dtype(type.dtype);
  managed.tensor.shape = dims;
  managed.tensor.strides = dims + rank;
  return owned;
}

dlpack::ManagedTensor* allocate(const Framework& framework, DType dtype, Device device, int64_t* shape, int rank) {
  dlpack::Tensor prototype{};
  prototype.device = dlpack_device(device);
  prototype.rank = rank;
  prototype.dtype = dlpack_dtype(dtype);
  prototype.shape = shape;
  dlpack::ManagedTensor* tensor = nullptr;
  std::string error;
  if (framework.api->allocate(&prototype, &tensor, &error, set_exchange_error) != 0 || !tensor)
    throw DeviceError(framework.name + " could not allocate " + to_string(Dims(shape, shape + rank)) + " of " +
                      std::string(dtype_name(dtype)) + " on " + to_string(device) + ": " + error);
  return tensor;
}

// What a capsule from `__dlpack__` is called by: an object with the two methods of the protocol.
struct Exporter {
  PyObject_HEAD
  dlpack::ManagedTensor* tensor;
};

void drop_capsule(PyObject* capsule) {
  if (!PyCapsule_IsValid(capsule, "dltensor_versioned")) return;  // it was taken, and renamed
  auto* tensor = static_cast<dlpack::ManagedTensor*>(PyCapsule_GetPointer(capsule, "dltensor_versioned"));
  tensor->deleter(tensor);
}

PyObject* exporter_dlpack(PyObject* self, PyObject*, PyObject*) {
  auto* exporter = reinterpret_cast<Exporter*>(self);
  if (!exporter->tensor) {
    PyErr_SetString(PyExc_BufferError, "this tensor was handed over already");
    return nullptr;
  }
  PyObject* capsule = PyCapsule_New(exporter->tensor, "dltensor_versioned", drop_capsule);
  if (capsule) exporter->tensor = nullptr;
  return capsule;
}

PyObject* exporter_device(PyObject* self, PyObject*) {
  auto* exporter = reinterpret_cast<Exporter*>(self);
  const dlpack::DeviceId device = exporter->tensor ? exporter->tensor->tensor.device : dlpack::DeviceId{1, 0};
  return Py_BuildValue("(ii)", static_cast<int>(device.type), static_cast<int>(device.index));
}

void exporter_dealloc(PyObject* self) {
  auto* exporter = reinterpret_cast<Exporter*>(self);
  if (exporter->tensor) exporter->tensor->deleter(exporter->tensor);
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyTypeObject* exporter_type() {
  static PyMethodDef methods[] = {
      {"__dlpack__", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(exporter_dlpack)), METH_VARARGS | METH_KEYWORDS, ""},
      {"__dlpack_device__", exporter_device, METH_NOARGS, ""},
      {nullptr, nullptr, 0, nullptr}};
  static PyType_Slot slots[] = {{Py_tp_methods, methods},
                                {Py_tp_dealloc, reinterpret_cast<void*>(exporter_dealloc)},
                                {0, nullptr}};
  static PyType_Spec spec{"fulmen._core.Exporter", sizeof(Exporter), 0, Py_TPFLAGS_DEFAULT, slots};
  static PyTypeObject* type = nullptr;  // under the GIL; no initialiser, whose guard could wait for the GIL
  if (!type) type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  if (!type) throw PythonError();
  return type;
}

PyObject* hand_over(const Framework& framework, dlpack::ManagedTensor* tensor) {
  if (framework.api) {
    void* object = nullptr;
    if (framework.api->import_managed(tensor, &object) != 0) throw PythonError();
    return static_cast<PyObject*>(object);
  }
  PyTypeObject* type = exporter_type();
  auto* exporter = reinterpret_cast<Exporter*>(type->tp_alloc(type, 0));
  if (!exporter) {
    tensor->deleter(tensor);
    throw PythonError();
  }
  exporter->tensor = tensor;
  PyObject* object = PyObject_CallOneArg(framework.from_dlpack, reinterpret_cast<PyObject*>(exporter));
  Py_DECREF(reinterpret_cast<PyObject*>(exporter));
  if (!object) throw PythonError();
  return object;
}

PyObject* import_attribute(const char* module_name, const char* attribute) {
  PyObject* module = PyImport_ImportModule(module_name);
  if (!module) throw PythonError();
  PyObject* found = PyObject_GetAttrString(module, attribute);
  Py_DECREF(module);
  if (!found) throw PythonError();
  return found;
}

std::unique_ptr<Framework> find_framework(PyTypeObject* type) {
  auto framework = std::make_unique<Framework>();
  PyObject* capsule = PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "__dlpack_c_exchange_api__");
  if (capsule) {
    if (PyCapsule_IsValid(capsule, "dlpack_exchange_api")) {
      const auto* api = static_cast<const dlpack::ExchangeApi*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
      while (api && api->version.major != dlpack::our_version.major) api = api->previous;
      framework->api = api;
    }
    Py_DECREF(capsule);
  } else {
    PyErr_Clear();
  }
  PyObject* module = PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "__module__");
  if (module && PyUnicode_Check(module)) {
    const std::string name = PyUnicode_AsUTF8(module);
    framework->name = name.substr(0, name.find('.'));
  }
  Py_XDECREF(module);
  PyErr_Clear();
  if (framework->name == "jaxlib") framework->name = "jax";
  if (framework->api) return framework;
  if (!PyObject_HasAttrString(reinterpret_cast<PyObject*>(type), "__dlpack__")) return nullptr;
  framework->from_dlpack = framework->name == "jax" ? import_attribute("jax.dlpack", "from_dlpack")
                                                    : import_attribute(framework->name.c_str(), "from_dlpack");
  return framework;
}

const Framework* lookup(PyObject* object) {
  // Types are few and live long; an entry keeps its type alive so that its address isn't used again.
  static auto* known = new std::unordered_map<PyTypeObject*, std::unique_ptr<Framework>>();
  static PyTypeObject* last_type = nullptr;
  static const Framework* last = nullptr;
  PyTypeObject* type = Py_TYPE(object);
  if (type == last_type) return last;
  auto at = known->find(type);
  if (at == known->end()) {
    auto found = find_framework(type);  // runs Python code: another thread may have been here meanwhile
    const auto [place, is_new] = known->emplace(type, std::move(found));
    if (is_new) Py_INCREF(reinterpret_cast<PyObject*>(type));
    at = place;
  }
  last_type = type;
  last = at->second.get();
  return last;
}

}  // namespace

TensorType TensorView::type() const {
  TensorType result;
  result.dtype = dtype;
  result.device = device;
  result.shape.assign(shape, shape + rank);
  result.strides.assign(strides, strides + rank);
  return result;
}

int64_t TensorView::element_count() const {
  int64_t count = 1;
  for (int i = 0; i < rank; ++i) count *= shape[i];
  return count;
}

bool is_tensor(PyObject* object) { return lookup(object) != nullptr; }

const Framework& framework_of(PyObject* object) {
  if (const Framework* framework = lookup(object)) return *framework;
  throw TypeError(std::string("a tensor is needed, found ") + Py_TYPE(object)->tp_name);
}

TensorReader::~TensorReader() {
  for (dlpack::ManagedTensor* tensor : managed_)
    if (tensor->deleter) tensor->deleter(tensor);
  for (dlpack::LegacyManagedTensor* tensor : legacy_)
    if (tensor->deleter) tensor->deleter(tensor);
}

TensorView TensorReader::read(PyObject* object, const char* what) {
  const Framework* framework = lookup(object);
  if (!framework) throw TypeError(std::string(what) + ": a tensor is needed, found " + Py_TYPE(object)->tp_name);
  if (framework->api) {
    if (framework->api->export_view) {
      dlpack::Tensor tensor;
      if (framework->api->export_view(object, &tensor) != 0) throw PythonError();
      return view_of(tensor, what, strides_);
    }
    dlpack::ManagedTensor* tensor = nullptr;
    if (framework->api->export_managed(object, &tensor) != 0) throw PythonError();
    managed_.push_back(tensor);
    return view_of(tensor->tensor, what, strides_);
  }
  PyObject* method = PyObject_GetAttrString(object, "__dlpack__");
  if (!method) throw PythonError();
  PyObject* no_args = PyTuple_New(0);
  PyObject* version = Py_BuildValue("{s:(ii)}", "max_version", 1, 0);
  PyObject* capsule = PyObject_Call(method, no_args, version);
  if (!capsule && PyErr_ExceptionMatches(PyExc_TypeError)) {  // a producer from before versions
    PyErr_Clear();
    capsule = PyObject_Call(method, no_args, nullptr);
  }
  Py_DECREF(version);
  Py_DECREF(no_args);
  Py_DECREF(method);
  if (!capsule) throw PythonError();
  TensorView view;
  if (PyCapsule_IsValid(capsule, "dltensor_versioned")) {
    auto* tensor = static_cast<dlpack::ManagedTensor*>(PyCapsule_GetPointer(capsule, "dltensor_versioned"));
    PyCapsule_SetName(capsule, "used_dltensor_versioned");
    Py_DECREF(capsule);
    managed_.push_back(tensor);
    if (tensor->version.major != dlpack::our_version.major)
      throw TypeError(std::string(what) + ": its framework speaks DLPack version " + std::to_string(tensor->version.major) +
                      ", Fulmen speaks 1");
    view = view_of(tensor->tensor, what, strides_);
    view.read_only = (tensor->flags & dlpack::flag_read_only) != 0;
  } else if (PyCapsule_IsValid(capsule, "dltensor")) {
    auto* tensor = static_cast<dlpack::LegacyManagedTensor*>(PyCapsule_GetPointer(capsule, "dltensor"));
    PyCapsule_SetName(capsule, "used_dltensor");
    Py_DECREF(capsule);
    legacy_.push_back(tensor);
    view = view_of(tensor->tensor, what, strides_);
  } else {
    Py_DECREF(capsule);
    throw TypeError(std::string(what) + ": __dlpack__ of " + Py_TYPE(object)->tp_name + " gave no DLPack capsule");
  }
  return view;
}

NewTensor make_tensor(const Framework& framework, const TensorType& type) {
  auto owned = describe(type);
  dlpack::Tensor& tensor = owned->managed.tensor;
  if (type.device.kind == DeviceKind::cpu) {
    owned->block = BufferPool::instance().take(type.bytes());
    tensor.data = owned->block.data;
  } else {
    if (!framework.api)
      throw TypeError("results on " + to_string(type.device) + " need a framework with DLPack's C functions; " +
                      framework.name + " has none");
    int64_t count = type.element_count();
    owned->inner = allocate(framework, type.dtype, type.device, &count, 1);
    tensor.data = static_cast<char*>(owned->inner->tensor.data) + owned->inner->tensor.byte_offset;
  }
  void* data = tensor.data;
  return {hand_over(framework, &owned.release()->managed), data};
}

const Framework& default_framework() {
  nb::dict modules = nb::cast<nb::dict>(nb::module_::import_("sys").attr("modules"));
  nb::object example = modules.contains("torch") ? nb::module_::import_("torch").attr("empty")(0)
                                                 : nb::module_::import_("numpy").attr("empty")(0);
  return framework_of(example.ptr());
}

PyObject* view_tensor(const Framework& framework, const TensorType& type, void* data) {
  auto owned = describe(type);
  owned->managed.tensor.data = data;
  return hand_over(framework, &owned.release()->managed);
}

namespace {
thread_local const Framework* running = nullptr;
}

const Framework& running_framework() { return running ? *running : default_framework(); }
RunningFramework::RunningFramework(const Framework& framework) : before_(std::exchange(running, &framework)) {}
RunningFramework::~RunningFramework() { running = before_; }

DeviceMemory::DeviceMemory(const Framework& framework, Device device, size_t bytes) {
  int64_t count = static_cast<int64_t>(bytes);
  if (framework.api) tensor_ = allocate(framework, DType::u8, device, &count, 1);
  else throw TypeError("memory on " + to_string(device) + " needs a framework with DLPack's C functions");
}

DeviceMemory::~DeviceMemory() {
  if (tensor_ && tensor_->deleter) tensor_->deleter(tensor_);
}

void* DeviceMemory::data() const { return tensor_ ? static_cast<char*>(tensor_->tensor.data) + tensor_->tensor.byte_offset : nullptr; }

void* current_stream(const Framework& framework, Device device) {
  if (device.kind != DeviceKind::cuda || !framework.api || !framework.api->current_stream) return nullptr;
  void* stream = nullptr;
  if (framework.api->current_stream(dlpack::device_cuda, device.index, &stream) != 0) throw PythonError();
  return stream;
}

namespace {

template <class T>
void copy_dims(const T* from, T* to, const int64_t* shape, const int64_t* from_strides, const int64_t* to_strides, int rank) {
  if (rank == 0) {
    *to = *from;
  } else if (rank == 1) {
    for (int64_t i = 0; i < shape[0]; ++i) to[i * to_strides[0]] = from[i * from_strides[0]];
  } else {
    for (int64_t i = 0; i < shape[0]; ++i)
      copy_dims(from + i * from_strides[0], to + i * to_strides[0], shape + 1, from_strides + 1, to_strides + 1, rank - 1);
  }
}

}  // namespace

void copy_strided(const TensorView& from, void* to, const int64_t* strides) {
  if (from.element_count() == 0) return;
  const auto copy = [&]<class T>(T) {
    copy_dims(static_cast<const T*>(from.data), static_cast<T*>(to), from.shape, from.strides, strides, from.rank);
  };
  switch (dtype_bytes(from.dtype)) {
    case 1: copy(uint8_t{}); break;
    case 2: copy(uint16_t{}); break;
    case 4: copy(uint32_t{}); break;
    default: copy(uint64_t{}); break;
  }
}

}  // namespace fulmen::python
