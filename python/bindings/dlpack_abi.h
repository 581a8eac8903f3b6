// The binary layout of DLPack 1.x as Fulmen uses it: a tensor described in C, owned by whoever made it, and the table
// of C functions that a framework offers on its tensor type (`__dlpack_c_exchange_api__`). Declared here so that no
// framework's header is needed; only facts of the public ABI stand in this file. Used by dlpack.h.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fulmen::dlpack {

struct Version {
  uint32_t major, minor;
};
inline constexpr Version our_version{1, 0};

enum DeviceType : int32_t { device_cpu = 1, device_cuda = 2, device_cuda_host = 3, device_cuda_managed = 13 };

struct DeviceId {
  int32_t type;
  int32_t index;
};

enum TypeCode : uint8_t { code_int = 0, code_uint = 1, code_float = 2, code_bfloat = 4, code_bool = 6 };

struct DataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};

struct Tensor {
  void* data;
  DeviceId device;
  int32_t rank;
  DataType dtype;
  int64_t* shape;
  int64_t* strides;  // in elements; null means contiguous in versions before 1.2
  uint64_t byte_offset;
};

// The older form, without a version: what a capsule named "dltensor" holds.
struct LegacyManagedTensor {
  Tensor tensor;
  void* context;
  void (*deleter)(LegacyManagedTensor* self);
};

inline constexpr uint64_t flag_read_only = 1;

// What a capsule named "dltensor_versioned" holds.
struct ManagedTensor {
  Version version;
  void* context;
  void (*deleter)(ManagedTensor* self);
  uint64_t flags;
  Tensor tensor;
};

using SetError = void (*)(void* context, const char* kind, const char* message);

struct ExchangeApi {
  Version version;
  const ExchangeApi* previous;
  int (*allocate)(Tensor* prototype, ManagedTensor** out, void* error_context, SetError set_error);
  int (*export_managed)(void* object, ManagedTensor** out);
  int (*import_managed)(ManagedTensor* tensor, void** out_object);  // steals the tensor
  int (*export_view)(void* object, Tensor* out);                    // may be null; valid while the object lives
  int (*current_stream)(int32_t device_type, int32_t device_index, void** out);
};

static_assert(sizeof(void*) == 8, "Fulmen needs a 64-bit machine");
static_assert(offsetof(ManagedTensor, tensor) == 32 && sizeof(Tensor) == 48 && offsetof(ExchangeApi, allocate) == 16);

}  // namespace fulmen::dlpack
