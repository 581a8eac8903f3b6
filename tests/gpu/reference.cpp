// The float64 reference on the GPU: one block a query row, then one block a key row.
#include <limits>
#include <mutex>

#include "executors/cudnn/converter.h"
#include "tests/gpu/attention_run.h"

namespace fulmen::gpu_tests {

namespace {

constexpr char source[] = R"cuda(
struct Sizes { long long batch, heads, key_heads, queries, keys, dim, value_dim; double scale; int rounding; };

// 0: exact, 1: bf16, 2: f16
__device__ double rounded(double value, int rounding) {
  if (rounding == 0) return value;
  const float single = (float)value;
  if (rounding == 1) {
    const unsigned word = __float_as_uint(single);
    return __uint_as_float((word + 0x7fff + (word >> 16 & 1)) & 0xffff0000u);
  }
  unsigned short bits;
  float back;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(single));
  asm("cvt.f32.f16 %0, %1;" : "=f"(back) : "h"(bits));
  return back;
}

__device__ double block_sum(double value) {
  __shared__ double parts[256];
  parts[threadIdx.x] = value;
  __syncthreads();
  for (int step = 128; step > 0; step >>= 1) {
    if (threadIdx.x < step) parts[threadIdx.x] += parts[threadIdx.x + step];
    __syncthreads();
  }
  const double sum = parts[0];
  __syncthreads();
  return sum;
}
__device__ double block_max(double value) {
  __shared__ double parts[256];
  parts[threadIdx.x] = value;
  __syncthreads();
  for (int step = 128; step > 0; step >>= 1) {
    if (threadIdx.x < step) parts[threadIdx.x] = fmax(parts[threadIdx.x], parts[threadIdx.x + step]);
    __syncthreads();
  }
  const double most = parts[0];
  __syncthreads();
  return most;
}

extern "C" __global__ void rows(Sizes s, const double* query, const double* key, const double* value,
                                const double* bias, const double* dropped, const double* out_grad, double* p,
                                double* ds, double* out, double* lse, double* query_grad, double* score_size,
                                double* row_size, double* query_size) {
  const long long row = blockIdx.x;
  const long long h = row / s.queries % s.heads, b = row / s.queries / s.heads;
  const long long kv = b * s.key_heads + h / (s.heads / s.key_heads);
  const double* q = query + row * s.dim;
  double* pr = p + row * s.keys;
  double most = -1.0 / 0.0;
  for (long long j = threadIdx.x; j < s.keys; j += blockDim.x) {
    double dot = 0;
    for (long long d = 0; d < s.dim; ++d) dot += q[d] * key[(kv * s.keys + j) * s.dim + d];
    pr[j] = dot * s.scale + bias[row * s.keys + j];
    most = fmax(most, pr[j]);
  }
  most = block_max(most);
  const bool closed = most == -1.0 / 0.0;
  double sum = 0;
  for (long long j = threadIdx.x; j < s.keys; j += blockDim.x) {
    pr[j] = closed ? 0.0 : exp(pr[j] - most);
    sum += pr[j];
  }
  sum = block_sum(sum);
  for (long long j = threadIdx.x; j < s.keys; j += blockDim.x) pr[j] = closed ? 0.0 : rounded(pr[j] / sum, s.rounding);
  if (threadIdx.x == 0) lse[row] = closed ? -1.0 / 0.0 : most + log(sum);
  __syncthreads();
  for (long long d = threadIdx.x; d < s.value_dim; d += blockDim.x) {
    double acc = 0;
    for (long long j = 0; j < s.keys; ++j)
      acc += pr[j] * (dropped ? dropped[row * s.keys + j] : 1.0) * value[(kv * s.keys + j) * s.value_dim + d];
    out[row * s.value_dim + d] = rounded(acc, s.rounding);
  }
  if (!out_grad) return;
  __syncthreads();
  const double* g = out_grad + row * s.value_dim;
  double size = 0;
  for (long long d = threadIdx.x; d < s.value_dim; d += blockDim.x) {
    const double term = g[d] * out[row * s.value_dim + d];
    size += term * term;
  }
  size = sqrt(block_sum(size));
  if (threadIdx.x == 0) row_size[row] = size;
  double delta = 0;
  for (long long j = threadIdx.x; j < s.keys; j += blockDim.x) {
    double dp = 0;
    for (long long d = 0; d < s.value_dim; ++d) dp += g[d] * value[(kv * s.keys + j) * s.value_dim + d];
    dp = rounded(dp, s.rounding);
    const double factor = dropped ? dropped[row * s.keys + j] : 1.0;
    ds[row * s.keys + j] = dp * factor;
    score_size[row * s.keys + j] = pr[j] * fabs(dp * factor);
    delta += pr[j] * dp * factor;
  }
  delta = block_sum(delta);
  for (long long j = threadIdx.x; j < s.keys; j += blockDim.x)
    ds[row * s.keys + j] = rounded(pr[j] * (ds[row * s.keys + j] - delta), s.rounding);
  __syncthreads();
  for (long long d = threadIdx.x; d < s.dim; d += blockDim.x) {
    double acc = 0, squares = 0, mean = 0;
    for (long long j = 0; j < s.keys; ++j) {
      const double k = key[(kv * s.keys + j) * s.dim + d], term = score_size[row * s.keys + j] * k;
      acc += ds[row * s.keys + j] * k;
      squares += term * term;
      mean += pr[j] * k;
    }
    query_grad[row * s.dim + d] = rounded(acc * s.scale, s.rounding);
    query_size[row * s.dim + d] = (sqrt(squares) + size * fabs(mean)) * fabs(s.scale);
  }
  __syncthreads();
  if (dropped)
    for (long long j = threadIdx.x; j < s.keys; j += blockDim.x) pr[j] *= dropped[row * s.keys + j];
}

__device__ unsigned scrambled(unsigned x) {
  x ^= x >> 16; x *= 0x7feb352du; x ^= x >> 15; x *= 0x846ca68bu; x ^= x >> 16;
  return x;
}
// kind 0: bool, 1: bf16, 2: f16, 3: f32
extern "C" __global__ void noise(void* data, long long count, int kind, unsigned seed) {
  for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < count; i += (long long)gridDim.x * blockDim.x) {
    const unsigned r = scrambled((unsigned)i * 2654435761u + seed);
    float sum = 0;  // four uniform numbers: close to normal
    for (int k = 0; k < 4; ++k) sum += (float)((r >> (8 * k)) & 255) / 255.0f - 0.5f;
    const float value = sum * 1.7f;
    if (kind == 0) ((unsigned char*)data)[i] = r % 10 < 7;
    if (kind == 1) ((unsigned short*)data)[i] = (unsigned short)(__float_as_uint(value) >> 16);
    if (kind == 2) {
      unsigned short half;
      asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(value));
      ((unsigned short*)data)[i] = half;
    }
    if (kind == 3) ((float*)data)[i] = value;
  }
}

extern "C" __global__ void columns(Sizes s, const double* query, const double* out_grad, const double* p,
                                   const double* ds, double* key_grad, double* value_grad, const double* score_size,
                                   const double* row_size, double* key_size) {
  const long long column = blockIdx.x;
  const long long j = column % s.keys, hk = column / s.keys % s.key_heads, b = column / s.keys / s.key_heads;
  const long long group = s.heads / s.key_heads;
  for (long long d = threadIdx.x; d < s.dim; d += blockDim.x) {
    double acc = 0, squares = 0;
    for (long long h = hk * group; h < (hk + 1) * group; ++h)
      for (long long i = 0; i < s.queries; ++i) {
        const long long row = (b * s.heads + h) * s.queries + i;
        const double q = query[row * s.dim + d];
        const double term = (score_size[row * s.keys + j] + p[row * s.keys + j] * row_size[row]) * q;
        acc += ds[row * s.keys + j] * q;
        squares += term * term;
      }
    key_grad[column * s.dim + d] = rounded(acc * s.scale, s.rounding);
    key_size[column * s.dim + d] = sqrt(squares) * fabs(s.scale);
  }
  for (long long d = threadIdx.x; d < s.value_dim; d += blockDim.x) {
    double acc = 0;
    for (long long h = hk * group; h < (hk + 1) * group; ++h)
      for (long long i = 0; i < s.queries; ++i) {
        const long long row = (b * s.heads + h) * s.queries + i;
        acc += p[row * s.keys + j] * out_grad[row * s.value_dim + d];
      }
    value_grad[column * s.value_dim + d] = rounded(acc, s.rounding);
  }
}
)cuda";

struct KernelSizes {
  long long batch, heads, key_heads, queries, keys, dim, value_dim;
  double scale;
  int rounding;
};

struct Functions {
  void *rows, *columns, *noise;
};

Functions functions(int device) {
  static std::mutex mutex;
  static std::map<int, Functions> made;
  std::lock_guard lock(mutex);
  if (const auto at = made.find(device); at != made.end()) return at->second;
  const cuda::Driver& driver = cuda::Driver::require();
  const std::string code = cudnn::compile_cuda(source, driver.device(device).compute_capability, "");
  void* module = driver.load_module(device, code.c_str());
  return made[device] = {driver.function(device, module, "rows"), driver.function(device, module, "columns"),
                         driver.function(device, module, "noise")};
}

}  // namespace

void fill_noise(int device, void* stream, const cudnn::TensorForm& form, void* data, uint32_t seed) {
  long long count = form.span();
  int kind = form.dtype == DType::boolean ? 0 : form.dtype == DType::bf16 ? 1 : form.dtype == DType::f16 ? 2 : 3;
  void* arguments[] = {&data, &count, &kind, &seed};
  cuda::Driver::require().launch(device, functions(device).noise, 2048, 256, stream, arguments);
}

Reference reference(const SdpaCall& call, const std::vector<double>& query, const std::vector<double>& key,
                    const std::vector<double>& value, const std::vector<double>& bias,
                    const std::vector<double>& dropped, const std::vector<double>& out_grad, int device,
                    DType rounding) {
  const cuda::Driver& driver = cuda::Driver::require();
  const Functions f = functions(device);
  KernelSizes sizes{call.batch(),   call.heads(),    call.key_heads(), call.query_len(),
                    call.key_len(), call.head_dim(), call.value_dim(), call.scale,
                    rounding == DType::bf16 ? 1 : rounding == DType::f16 ? 2 : 0};
  std::vector<void*> held;
  const auto to_device = [&](const std::vector<double>& values, size_t count) -> double* {
    if (count == 0) return nullptr;
    void* memory = driver.allocate(device, count * sizeof(double), nullptr);
    held.push_back(memory);
    if (!values.empty()) driver.copy_to_device(device, memory, values.data(), count * sizeof(double), nullptr);
    return static_cast<double*>(memory);
  };
  const size_t rows = static_cast<size_t>(call.batch() * call.heads() * call.query_len());
  const size_t keys = static_cast<size_t>(call.key_len());
  const std::vector<double> none;
  double* d_query = to_device(query, query.size());
  double* d_key = to_device(key, key.size());
  double* d_value = to_device(value, value.size());
  double* d_bias = to_device(bias, bias.size());
  double* d_dropped = to_device(dropped, dropped.size());
  double* d_out_grad = to_device(out_grad, out_grad.size());
  double* d_p = to_device(none, rows * keys);
  double* d_ds = to_device(none, rows * keys);
  double* d_out = to_device(none, rows * static_cast<size_t>(call.value_dim()));
  double* d_lse = to_device(none, rows);
  double* d_query_grad = to_device(none, query.size());
  double* d_key_grad = to_device(none, key.size());
  double* d_value_grad = to_device(none, value.size());
  double* d_score_size = to_device(none, rows * keys);
  double* d_row_size = to_device(none, rows);
  double* d_query_size = to_device(none, query.size());
  double* d_key_size = to_device(none, key.size());
  void* row_arguments[] = {&sizes, &d_query, &d_key, &d_value, &d_bias, &d_dropped, &d_out_grad,
                           &d_p,   &d_ds,    &d_out, &d_lse,   &d_query_grad, &d_score_size, &d_row_size, &d_query_size};
  driver.launch(device, f.rows, static_cast<unsigned>(rows), 256, nullptr, row_arguments);
  if (!out_grad.empty()) {
    void* column_arguments[] = {&sizes, &d_query, &d_out_grad, &d_p, &d_ds, &d_key_grad, &d_value_grad,
                                &d_score_size, &d_row_size, &d_key_size};
    driver.launch(device, f.columns, static_cast<unsigned>(call.batch() * call.key_heads() * call.key_len()), 256,
                  nullptr, column_arguments);
  }
  Reference result;
  const auto to_host = [&](std::vector<double>& values, const double* memory, size_t count) {
    values.resize(count);
    driver.copy_to_host(device, values.data(), memory, count * sizeof(double), nullptr);
  };
  to_host(result.out, d_out, rows * static_cast<size_t>(call.value_dim()));
  to_host(result.lse, d_lse, rows);
  if (!out_grad.empty()) {
    to_host(result.query_grad, d_query_grad, query.size());
    to_host(result.key_grad, d_key_grad, key.size());
    to_host(result.value_grad, d_value_grad, value.size());
    to_host(result.bias_grad, d_ds, rows * keys);
    to_host(result.query_size, d_query_size, query.size());
    to_host(result.key_size, d_key_size, key.size());
    to_host(result.score_size, d_score_size, rows * keys);
    to_host(result.row_size, d_row_size, rows);
    to_host(result.probability, d_p, rows * keys);
  }
  driver.synchronize(device, nullptr);
  for (void* memory : held) driver.release(device, memory, nullptr);
  return result;
}

}  // namespace fulmen::gpu_tests
