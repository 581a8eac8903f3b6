// The small kernels around cuDNN's: masks to biases, copies between layouts, rows without an open key. Compiled by NVRTC
// on first need, once a device; a call that needs none of them never opens NVRTC.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include "executors/cudnn/problem.h"
#include "runtime/cuda/driver.h"

namespace fulmen::cudnn {

class Converter {
 public:
  // `cudnn_folder`: NVRTC is looked for beside cuDNN too.
  explicit Converter(std::string cudnn_folder) : cudnn_folder_(std::move(cudnn_folder)) {}

  // Writes the mask as a bias (bool: 0 and -inf; float: copied) with the columns up to each row's stride closed, and for
  // each row of the bias whether any key is open. `bias` or `open` may be null where one isn't wanted. With an lse, does
  // what open_lse does in the same launch.
  void read_mask(int device, void* stream, const TensorForm& mask, const void* mask_data, const TensorForm& bias,
                 void* bias_data, uint8_t* open, const float* lse_from = nullptr, float* lse_to = nullptr,
                 int64_t lse_count = 0);

  // i32 [batch] on the device, all `length`: written once and kept, so that captured graphs can be replayed at any time.
  const void* constant_lengths(int device, int64_t batch, int64_t length);

  // Elementwise between two layouts of the same dims and dtype. Rows of `to` beyond those of `from` become 0.
  void copy(int device, void* stream, const TensorForm& from, const void* from_data, const TensorForm& to,
            void* to_data);

  // Several in one launch; those without a target are left out.
  struct Copy {
    TensorForm from;
    const void* source;
    TensorForm to;
    void* target;
  };
  static constexpr int copies_together = 6;
  void copy(int device, void* stream, std::initializer_list<Copy> wanted);

  // Sums `from` over the dimensions that are 1 in `to`, in an order that never changes. dtype: bf16, f16 or f32.
  void sum(int device, void* stream, const TensorForm& from, const void* from_data, const TensorForm& to,
           void* to_data);

  void fill_zero(int device, void* stream, const TensorForm& form, void* data);

  // Rows of the result that have no open key become 0, and their lse -inf. `open` is over the bias's dims (batch, heads,
  // query_len, 1 of them broadcast); or `lengths`, i32 [batch], closes all rows of a batch whose length is 0.
  void close_rows(int device, void* stream, const TensorForm& bias, const uint8_t* open, const int32_t* lengths,
                  const TensorForm& out, void* out_data, float* lse);

  // lse with +inf for -inf: exp(score - lse) is then 0 in the backward of a row that has no open key.
  void open_lse(int device, void* stream, const float* lse, float* to, int64_t count);

 private:
  enum Function { mask2, mask4, copies, close2, close4, lse, sum_all, function_count };
  struct Loaded {
    std::array<void*, function_count> functions{};
  };
  const Loaded& loaded(int device);

  std::string cudnn_folder_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Loaded>> devices_;
  struct LengthChunk {
    char* next = nullptr;
    size_t left = 0;
  };
  std::map<std::tuple<int, int64_t, int64_t>, const void*> lengths_;  // by device, batch and length
  std::map<int, LengthChunk> chunks_;
};

// The kernels' source, for tests: NVRTC compiles it without a GPU.
const char* converter_source();

// Compiles CUDA C++ for a compute capability: a cubin, or PTX of the newest architecture that this NVRTC knows.
// DeviceError with NVRTC's log.
std::string compile_cuda(const std::string& source, int compute_capability, const std::string& cudnn_folder);

}  // namespace fulmen::cudnn
