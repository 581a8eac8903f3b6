// oneDNN's functions, opened at run time, so that programs start without it and run where it is missing. Types come
// from the headers that Fulmen was compiled with; another major version is refused.
//
// oneDNN brings an OpenMP runtime of its own. Fulmen's threads call it for independent pieces of work and tell it, each
// for itself, to use one thread (SingleThread below): two pools would fight for the cores.
#pragma once

#include <oneapi/dnnl/dnnl.h>

#include <memory>
#include <string>

namespace fulmen::onednn {

#define FULMEN_ONEDNN_FUNCTIONS(F)                                                                              \
  F(dnnl_version) F(dnnl_engine_create) F(dnnl_stream_create) F(dnnl_stream_destroy)                            \
  F(dnnl_memory_desc_init_by_strides) F(dnnl_memory_desc_init_by_tag) F(dnnl_memory_desc_get_size)               \
  F(dnnl_memory_desc_equal) F(dnnl_memory_create) F(dnnl_memory_destroy) F(dnnl_primitive_attr_create)           \
  F(dnnl_primitive_attr_destroy) F(dnnl_primitive_attr_set_scratchpad_mode) F(dnnl_primitive_desc_create)        \
  F(dnnl_primitive_desc_destroy) F(dnnl_primitive_desc_query) F(dnnl_primitive_desc_query_md)                    \
  F(dnnl_primitive_create) F(dnnl_primitive_destroy) F(dnnl_primitive_execute) F(dnnl_stream_wait)               \
  F(dnnl_reorder_primitive_desc_create) F(dnnl_dilated_convolution_forward_desc_init)                            \
  F(dnnl_dilated_convolution_backward_data_desc_init) F(dnnl_dilated_convolution_backward_weights_desc_init)

struct Library {
  std::string unavailable_reason;  // empty if it can be used
  std::string version;
  dnnl_engine_t engine = nullptr;
  void (*omp_set_num_threads)(int) = nullptr;  // of the runtime that oneDNN uses; null if it uses none
  int (*omp_get_max_threads)() = nullptr;
#define FULMEN_ONEDNN_MEMBER(name) decltype(&::name) name = nullptr;
  FULMEN_ONEDNN_FUNCTIONS(FULMEN_ONEDNN_MEMBER)
#undef FULMEN_ONEDNN_MEMBER
};

// Opened on first use, then kept for the life of the process.
const Library& library();

// Throws DeviceError with the call's name and status unless it succeeded.
void check(dnnl_status_t status, const char* call);

// While it lives, oneDNN calls of this thread use this thread alone.
class SingleThread {
 public:
  SingleThread();
  ~SingleThread();
  SingleThread(const SingleThread&) = delete;
  SingleThread& operator=(const SingleThread&) = delete;

 private:
  int before_ = 1;
};

struct DestroyPrimitive {
  void operator()(dnnl_primitive_t p) const { library().dnnl_primitive_destroy(p); }
};
struct DestroyPrimitiveDesc {
  void operator()(dnnl_primitive_desc_t p) const { library().dnnl_primitive_desc_destroy(p); }
};
struct DestroyMemory {
  void operator()(dnnl_memory_t p) const { library().dnnl_memory_destroy(p); }
};
struct DestroyStream {
  void operator()(dnnl_stream_t p) const { library().dnnl_stream_destroy(p); }
};
using Primitive = std::unique_ptr<dnnl_primitive, DestroyPrimitive>;
using PrimitiveDesc = std::unique_ptr<dnnl_primitive_desc, DestroyPrimitiveDesc>;
using Memory = std::unique_ptr<dnnl_memory, DestroyMemory>;
using Stream = std::unique_ptr<dnnl_stream, DestroyStream>;

}  // namespace fulmen::onednn
