// Tensors of any framework, read and made without its headers: through the DLPack C functions of its tensor type where
// it has them (PyTorch 2.10 and newer; no Python call), else through `__dlpack__` (NumPy, JAX, CuPy).
// The binary layout is in dlpack_abi.h; checks against a program's types are in compiled.cpp.
#pragma once

#include <Python.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "buffer_pool.h"
#include "core/tensor_type.h"
#include "dlpack_abi.h"

namespace fulmen::python {

// A tensor as it lies in memory. `shape` and `strides` (in elements, never null) live as long as the reader.
struct TensorView {
  void* data = nullptr;
  DType dtype = DType::f32;
  Device device;
  int rank = 0;
  const int64_t* shape = nullptr;
  const int64_t* strides = nullptr;
  bool read_only = false;

  TensorType type() const;
  int64_t element_count() const;
};

// The framework of a Python type: its C functions, or how to hand it a tensor.
struct Framework {
  const dlpack::ExchangeApi* api = nullptr;
  PyObject* from_dlpack = nullptr;  // a Python function for frameworks without C functions; owned
  std::string name;                 // "torch", "numpy", ...
};

// Of an object's type; found once a type. TypeError if the object is no tensor. Needs the GIL.
const Framework& framework_of(PyObject* object);
bool is_tensor(PyObject* object);

// Reads tensors and keeps what must stay alive for as long as their views are used.
class TensorReader {
 public:
  TensorReader() = default;
  TensorReader(const TensorReader&) = delete;
  ~TensorReader();

  // `what` names the argument in messages.
  TensorView read(PyObject* object, const char* what);

 private:
  std::vector<dlpack::ManagedTensor*> managed_;
  std::vector<dlpack::LegacyManagedTensor*> legacy_;
  std::vector<std::unique_ptr<int64_t[]>> strides_;
};

// A new tensor of `framework`, not initialised, laid out as `type` says (its strides must be dense: a permutation of
// contiguous dims). On the CPU its memory comes from the pool; on a device from the framework's allocator.
struct NewTensor {
  PyObject* object = nullptr;  // a new reference
  void* data = nullptr;
};
NewTensor make_tensor(const Framework& framework, const TensorType& type);

// The framework that tensors are made in when no input tells: PyTorch if it is loaded, else NumPy.
const Framework& default_framework();

// A tensor over memory that stays the caller's: valid only while that memory is. A new reference.
PyObject* view_tensor(const Framework& framework, const TensorType& type, void* data);

// The framework whose tensors the program on this thread is run with; the default one outside a run. Kernels written
// in Python (python_executor.cpp) get their tensors in it.
const Framework& running_framework();
class RunningFramework {
 public:
  explicit RunningFramework(const Framework& framework);
  ~RunningFramework();

 private:
  const Framework* before_;
};

// Device memory that lives as long as this: from the framework's allocator, so that its stream order holds.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  DeviceMemory(const Framework& framework, Device device, size_t bytes);
  DeviceMemory(DeviceMemory&& other) noexcept : tensor_(std::exchange(other.tensor_, nullptr)) {}
  DeviceMemory& operator=(DeviceMemory&& other) noexcept {
    std::swap(tensor_, other.tensor_);
    return *this;
  }
  ~DeviceMemory();
  void* data() const;

 private:
  dlpack::ManagedTensor* tensor_ = nullptr;
};

// The framework's current stream on that device; null on the CPU.
void* current_stream(const Framework& framework, Device device);

// Copies a strided host tensor into memory laid out by `strides`.
void copy_strided(const TensorView& from, void* to, const int64_t* strides);

}  // namespace fulmen::python
