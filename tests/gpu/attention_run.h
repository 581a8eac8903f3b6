// Runs one attention call on the GPU through the cuDNN executor and compares it with a float64 reference that runs on
// the GPU too (plain loops, compiled by NVRTC): forward, lse, and every gradient. Memory around and between the
// elements of every result is watched.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "executors/cudnn/cudnn.h"
#include "executors/cudnn/problem.h"
#include "runtime/cuda/driver.h"

namespace fulmen::gpu_tests {

// How a call's numbers are drawn.
struct Data {
  uint64_t seed = 1;
  double query_scale = 1, key_scale = 1, grad_scale = 1;
  double shift = 0;        // added to every logit through one channel of query and key
  double closed = 0.3;     // share of closed mask elements
  int closed_rows = 0;     // mask rows with no open key
  bool all_closed = false;
  bool grad_is_ones = false;
};

struct Outcome {
  std::string trouble;                  // empty: right
  std::map<std::string, double> error;  // by tensor: root mean square of the error over that of the reference
  std::string refused;                  // the reason, if the call wasn't claimed
};

class AttentionRun {
 public:
  AttentionRun(const cudnn::Context& context, SdpaCall call, cudnn::SdpaLayouts layouts, int device = 0);
  ~AttentionRun();

  bool claimed() const { return kernel_ != nullptr; }
  const std::string& refusal() const { return refusal_; }
  const Plan& plan() const;
  // The difference of a result from the reference that is still right: by dtype, relative.
  Outcome compare(const Data& data);
  // Milliseconds of forward and backward, the median of `rounds` runs (events around each).
  struct Times {
    double forward = 0, backward = 0, both = 0;
  };
  Times time(int rounds);
  // Forward and backward again on the data of the last compare, for determinism and capture: the bytes of all results.
  std::vector<uint8_t> run_again(bool clear_first = true);
  void draw(const Data& data);
  void enqueue(bool forward = true, bool backward = true);
  void* stream() const { return stream_; }
  void set_stream(void* stream) { stream_ = stream; }

 private:
  struct Buffer;
  Buffer& buffer(const std::string& name);
  void make(const std::string& name, const cudnn::TensorForm& form, size_t offset_bytes = 0);
  std::vector<double> download(const std::string& name, std::string& trouble);
  void upload(const std::string& name, const std::vector<double>& values);

  const cudnn::Context& context_;
  SdpaCall call_;
  cudnn::SdpaLayouts layouts_;
  int device_;
  Target target_;
  std::shared_ptr<const Claim> claim_;
  std::shared_ptr<const cudnn::SdpaKernel> kernel_;
  const cudnn::Problem* problem_ = nullptr;
  std::string refusal_;
  std::map<std::string, std::unique_ptr<Buffer>> buffers_;
  void* stream_ = nullptr;
  void* own_stream_ = nullptr;
  void* workspace_ = nullptr;
  std::vector<int32_t> lengths_;
  std::map<std::string, std::vector<double>> values_;  // what was drawn, rounded to the dtype
};

// The reference: contiguous doubles; bias holds -inf where a key is closed; dropped holds the factor of each
// probability (empty: 1). `rounding`: the dtype that probabilities, their gradients and results are rounded to, as the
// decomposition into plain operations stores them (f64: not at all).
struct Reference {
  std::vector<double> out, lse, query_grad, key_grad, value_grad, bias_grad;
  // How large the terms are that cancel in a gradient, an element each: what a rounding of 1 would do to it if roundings
  // are independent. score_size (as bias_grad) and row_size (as lse) are those of P * dP and of the sum of out * out_grad.
  std::vector<double> query_size, key_size, score_size, row_size, probability;
};
Reference reference(const SdpaCall& call, const std::vector<double>& query, const std::vector<double>& key,
                    const std::vector<double>& value, const std::vector<double>& bias,
                    const std::vector<double>& dropped, const std::vector<double>& out_grad, int device,
                    DType rounding = DType::f64);

// Fills memory with numbers of about unit size (bool: seven of ten true), fast: for timing.
void fill_noise(int device, void* stream, const cudnn::TensorForm& form, void* data, uint32_t seed);

}  // namespace fulmen::gpu_tests
