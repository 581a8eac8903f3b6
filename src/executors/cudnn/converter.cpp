#include "executors/cudnn/converter.h"

#include <dlfcn.h>

#include <algorithm>
#include <limits>

#include "core/error.h"

namespace fulmen::cudnn {

namespace {

constexpr char source_text[] = R"cuda(
struct Form {
  long long dims[4];
  long long strides[4];
};

__device__ long long offset_of(const Form& form, long long b, long long h, long long q, long long k) {
  return b * form.strides[0] + h * form.strides[1] + q * form.strides[2] + k * form.strides[3];
}

// Pieces of 16 bytes of a row, as the mask's elements read together.
template <class T, int bytes> struct Together;
template <> struct Together<unsigned short, 1> { typedef uint2 type; };
template <> struct Together<unsigned short, 2> { typedef uint4 type; };
template <> struct Together<unsigned, 1> { typedef unsigned type; };
template <> struct Together<unsigned, 4> { typedef uint4 type; };

// One row of the bias, by a warp: 16 bytes a lane at a time where the mask's row allows it, two of them under way.
// S: the mask's element, a byte for a bool mask. Without `bias` the row is read until an open key is found. Gives whether
// there is one.
template <class T, class S>
__device__ int read_row(int lane, const S* mask, long long step, long long keys, long long stride, T* bias, T closed) {
  constexpr int together = 16 / sizeof(T), ahead = 2;
  typedef typename Together<T, sizeof(S)>::type Words;
  const bool whole = step == 1 && reinterpret_cast<unsigned long long>(mask) % sizeof(Words) == 0;
  const bool aligned = reinterpret_cast<unsigned long long>(bias) % 16 == 0;
  int any = 0;
  for (long long begin = 0; begin < stride; begin += 32 * together * ahead) {
    union { S values[together]; Words words; } read[ahead];
    #pragma unroll
    for (int piece = 0; piece < ahead; ++piece) {
      const long long k = begin + (piece * 32 + lane) * together;
      if (whole && k + together <= keys)
        read[piece].words = *reinterpret_cast<const Words*>(mask + k);
      else
        for (int i = 0; i < together; ++i) read[piece].values[i] = k + i < keys ? mask[(k + i) * step] : S(0);
    }
    #pragma unroll
    for (int piece = 0; piece < ahead; ++piece) {
      const long long k = begin + (piece * 32 + lane) * together;
      union { T values[together]; uint4 words; } made;
      for (int i = 0; i < together; ++i) {
        const S value = read[piece].values[i];
        made.values[i] = k + i >= keys ? closed : sizeof(S) == 1 ? (value ? T(0) : closed) : T(value);
        any |= made.values[i] != closed;
      }
      if (bias && aligned && k + together <= stride)
        *reinterpret_cast<uint4*>(bias + k) = made.words;
      else if (bias)
        for (int i = 0; i < together && k + i < stride; ++i) bias[k + i] = made.values[i];
    }
    if (!bias && __any_sync(~0u, any)) return 1;
  }
  return __any_sync(~0u, any);
}

// One warp a row of the bias, eight a block, then blocks that open the lse. kind 0: bool mask. kind 1: additive mask,
// copied. closed is -inf in the bias's dtype.
template <class T>
__device__ void prepare(const Form& mask, const void* mask_data, int kind, const Form& bias, T* bias_data, T closed,
                        unsigned char* open, long long rows, const float* lse, float* lse_to, long long lse_count) {
  const long long row_blocks = (rows + 7) / 8;
  if (blockIdx.x >= row_blocks) {
    const long long i = (blockIdx.x - row_blocks) * (long long)blockDim.x + threadIdx.x;
    if (i >= lse_count) return;
    const float value = lse[i];
    lse_to[i] = value == __int_as_float(0xff800000) ? __int_as_float(0x7f800000) : value;
    return;
  }
  const int lane = threadIdx.x % 32;
  const long long row = blockIdx.x * 8ll + threadIdx.x / 32;
  if (row >= rows) return;
  const long long q = row % bias.dims[2], h = row / bias.dims[2] % bias.dims[1], b = row / bias.dims[2] / bias.dims[1];
  // A mask dimension of 1 under a wider bias repeats.
  const long long from = offset_of(mask, mask.dims[0] == 1 ? 0 : b, mask.dims[1] == 1 ? 0 : h, mask.dims[2] == 1 ? 0 : q, 0);
  const long long step = mask.dims[3] == 1 ? 0 : mask.strides[3];
  T* to = bias_data ? bias_data + offset_of(bias, b, h, q, 0) : nullptr;
  // Rows lie `stride` apart; what is between the last key and the next row is closed too.
  long long stride = bias.dims[3];
  for (int i = 2; i >= 0; --i)
    if (bias.dims[i] > 1) { stride = bias.strides[i]; break; }
  if (!to || stride < bias.dims[3] || stride > bias.dims[3] + 8) stride = bias.dims[3];
  const int any = kind == 0
      ? read_row<T>(lane, static_cast<const unsigned char*>(mask_data) + from, step, bias.dims[3], stride, to, closed)
      : read_row<T>(lane, static_cast<const T*>(mask_data) + from, step, bias.dims[3], stride, to, closed);
  if (open && lane == 0) open[row] = any != 0;
}

extern "C" __global__ void mask2(Form mask, const void* data, int kind, Form bias, unsigned short* to, unsigned closed,
                                 unsigned char* open, long long rows, const float* lse, float* lse_to, long long lse_count) {
  prepare<unsigned short>(mask, data, kind, bias, to, static_cast<unsigned short>(closed), open, rows, lse, lse_to, lse_count);
}
extern "C" __global__ void mask4(Form mask, const void* data, int kind, Form bias, unsigned* to, unsigned closed,
                                 unsigned char* open, long long rows, const float* lse, float* lse_to, long long lse_count) {
  prepare<unsigned>(mask, data, kind, bias, to, closed, open, rows, lse, lse_to, lse_count);
}

template <class T, class Index>
__device__ void copy_range(const Form& from, const T* source, const Form& to, T* target, Index count, Index first, Index step) {
  const Index keys = to.dims[3], queries = to.dims[2], heads = to.dims[1];
  for (Index i = first; i < count; i += step) {
    const Index row = i / keys, k = i - row * keys, plane = row / queries, q = row - plane * queries, b = plane / heads,
                h = plane - b * heads;
    target[offset_of(to, b, h, q, k)] = source && q < from.dims[2] ? source[offset_of(from, b, h, q, k)] : T();
  }
}
template <class T>
__device__ void copy_all(const Form& from, const void* source, const Form& to, void* target, long long count, unsigned block,
                         unsigned blocks) {
  const T* read = static_cast<const T*>(source);
  T* written = static_cast<T*>(target);
  const long long first = block * (long long)blockDim.x + threadIdx.x, step = blocks * (long long)blockDim.x;
  if (count < 0x7fff0000ll - step)
    copy_range<T, unsigned>(from, read, to, written, static_cast<unsigned>(count), static_cast<unsigned>(first), static_cast<unsigned>(step));
  else
    copy_range<T, long long>(from, read, to, written, count, first, step);
}

// Several copies in one launch, each by blocks of its own. size: bytes of what moves together.
struct Copy {
  Form from, to;
  const void* source;
  void* target;
  long long count;
  int size;
  unsigned begin, blocks;
};
struct Copies {
  Copy copy[6];
  int count;
};
extern "C" __global__ void copies(const Copies all) {
  int i = 0;
  while (i + 1 < all.count && blockIdx.x >= all.copy[i + 1].begin) ++i;
  const Copy& c = all.copy[i];
  const unsigned block = blockIdx.x - c.begin;
  if (c.size == 16)
    copy_all<uint4>(c.from, c.source, c.to, c.target, c.count, block, c.blocks);
  else if (c.size == 4)
    copy_all<unsigned>(c.from, c.source, c.to, c.target, c.count, block, c.blocks);
  else
    copy_all<unsigned short>(c.from, c.source, c.to, c.target, c.count, block, c.blocks);
}

template <class T>
__device__ void close_all(const Form bias, const unsigned char* open, const int* lengths, const Form out, T* data,
                          float* lse, long long rows) {
  const long long row = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (row >= rows) return;
  const long long q = row % out.dims[2], h = row / out.dims[2] % out.dims[1], b = row / out.dims[2] / out.dims[1];
  bool closed = lengths && lengths[b] <= 0;
  if (open) {
    const long long bb = bias.dims[0] == 1 ? 0 : b, bh = bias.dims[1] == 1 ? 0 : h, bq = bias.dims[2] == 1 ? 0 : q;
    closed |= !open[(bb * bias.dims[1] + bh) * bias.dims[2] + bq];
  }
  if (!closed) return;
  for (long long k = 0; k < out.dims[3]; ++k) data[offset_of(out, b, h, q, k)] = T(0);
  if (lse) lse[row] = __int_as_float(0xff800000);
}
extern "C" __global__ void close2(Form bias, const unsigned char* open, const int* lengths, Form out,
                                  unsigned short* data, float* lse, long long rows) {
  close_all<unsigned short>(bias, open, lengths, out, data, lse, rows);
}
extern "C" __global__ void close4(Form bias, const unsigned char* open, const int* lengths, Form out, unsigned* data,
                                  float* lse, long long rows) {
  close_all<unsigned>(bias, open, lengths, out, data, lse, rows);
}

// kind 1: bf16, 2: f16, 3: f32
__device__ float read_number(const void* data, long long i, int kind) {
  if (kind == 3) return static_cast<const float*>(data)[i];
  const unsigned short bits = static_cast<const unsigned short*>(data)[i];
  if (kind == 1) return __uint_as_float(static_cast<unsigned>(bits) << 16);
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}
__device__ void write_number(void* data, long long i, int kind, float value) {
  if (kind == 3) {
    static_cast<float*>(data)[i] = value;
    return;
  }
  unsigned short bits;
  if (kind == 2) {
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  } else {
    const unsigned word = __float_as_uint(value);
    bits = value != value ? 0x7fff : static_cast<unsigned short>((word + 0x7fff + (word >> 16 & 1)) >> 16);
  }
  static_cast<unsigned short*>(data)[i] = bits;
}
// A block of 32 x 8 threads makes 32 elements of a row of `to`, or 1 where the keys are summed too: each thread sums a
// fixed share, then the shares are added in order.
extern "C" __global__ void sum_all(Form from, const void* source, Form to, void* target, int kind) {
  const bool over_keys = to.dims[3] == 1 && from.dims[3] > 1;
  const long long tiles = over_keys ? 1 : (to.dims[3] + 31) / 32;
  long long rest = blockIdx.x;
  const long long tile = rest % tiles;
  rest /= tiles;
  const long long q = rest % to.dims[2], h = rest / to.dims[2] % to.dims[1], b = rest / to.dims[2] / to.dims[1];
  const int lane = threadIdx.x % 32, share = threadIdx.x / 32;
  const long long key = tile * 32 + lane;
  const long long batches = to.dims[0] == 1 ? from.dims[0] : 1, heads = to.dims[1] == 1 ? from.dims[1] : 1,
                  queries = to.dims[2] == 1 ? from.dims[2] : 1;
  float sum = 0;
  if (over_keys || key < to.dims[3])
    for (long long i = share; i < batches * heads * queries; i += 8) {
      const long long row = offset_of(from, b + i / queries / heads, h + i / queries % heads, q + i % queries, 0);
      if (!over_keys)
        sum += read_number(source, row + key * from.strides[3], kind);
      else
        for (long long k = lane; k < from.dims[3]; k += 32) sum += read_number(source, row + k * from.strides[3], kind);
    }
  __shared__ float parts[256];
  parts[threadIdx.x] = sum;
  __syncthreads();
  if (share != 0 || (over_keys ? lane != 0 : key >= to.dims[3])) return;
  float total = 0;
  for (int i = lane; i < 256; i += over_keys ? 1 : 32) total += parts[i];
  write_number(target, offset_of(to, b, h, q, over_keys ? 0 : key), kind, total);
}

extern "C" __global__ void open_lse(const float* lse, float* to, long long count) {
  const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (i >= count) return;
  const float value = lse[i];
  to[i] = value == __int_as_float(0xff800000) ? __int_as_float(0x7f800000) : value;
}
)cuda";

struct KernelForm {
  long long dims[4];
  long long strides[4];
  KernelForm() = default;
  explicit KernelForm(const TensorForm& form) {
    for (int i = 0; i < 4; ++i) dims[i] = form.dims[i], strides[i] = form.strides[i];
  }
};

unsigned blocks_for(int64_t count, int64_t threads) {
  const int64_t blocks = (count + threads - 1) / threads;
  FULMEN_CHECK(blocks <= std::numeric_limits<int32_t>::max());
  return static_cast<unsigned>(std::max<int64_t>(1, blocks));
}

unsigned minus_infinity(DType dtype) {
  return dtype == DType::bf16 ? 0xff80u : dtype == DType::f16 ? 0xfc00u : 0xff800000u;
}

void* open_nvrtc(const std::string& cudnn_folder) {
  for (const char* name : {"libnvrtc.so.13", "libnvrtc.so.12"})
    if (void* library = dlopen(name, RTLD_NOW | RTLD_NOLOAD)) return library;
  const std::string folders[] = {"", cudnn_folder + "/../../cu13/lib/", cudnn_folder + "/../../cuda_nvrtc/lib/",
                                 cudnn_folder + "/", "/usr/local/cuda/lib64/"};
  for (const std::string& folder : folders)
    for (const char* name : {"libnvrtc.so.13", "libnvrtc.so.12"})
      if (void* library = dlopen((folder + name).c_str(), RTLD_NOW)) return library;
  throw DeviceError("cudnn: this call needs a conversion kernel, and NVRTC (libnvrtc.so.13) is not found");
}

}  // namespace

const char* converter_source() { return source_text; }

std::string compile_cuda(const std::string& source, int compute_capability, const std::string& cudnn_folder) {
  static void* library = open_nvrtc(cudnn_folder);
  const auto symbol = [](const char* name) {
    void* found = dlsym(library, name);
    if (!found) throw DeviceError(std::string("nvrtc: the library has no ") + name);
    return found;
  };
  const auto create = reinterpret_cast<int (*)(void**, const char*, const char*, int, const char**, const char**)>(
      symbol("nvrtcCreateProgram"));
  const auto compile = reinterpret_cast<int (*)(void*, int, const char**)>(symbol("nvrtcCompileProgram"));
  const auto log_size = reinterpret_cast<int (*)(void*, size_t*)>(symbol("nvrtcGetProgramLogSize"));
  const auto log_text = reinterpret_cast<int (*)(void*, char*)>(symbol("nvrtcGetProgramLog"));
  const auto image_size = reinterpret_cast<int (*)(void*, size_t*)>(symbol("nvrtcGetCUBINSize"));
  const auto image = reinterpret_cast<int (*)(void*, char*)>(symbol("nvrtcGetCUBIN"));
  const auto ptx_size = reinterpret_cast<int (*)(void*, size_t*)>(symbol("nvrtcGetPTXSize"));
  const auto ptx = reinterpret_cast<int (*)(void*, char*)>(symbol("nvrtcGetPTX"));
  const auto arch_count = reinterpret_cast<int (*)(int*)>(symbol("nvrtcGetNumSupportedArchs"));
  const auto archs = reinterpret_cast<int (*)(int*)>(symbol("nvrtcGetSupportedArchs"));
  const auto destroy = reinterpret_cast<int (*)(void**)>(symbol("nvrtcDestroyProgram"));
  int count = 0;
  arch_count(&count);
  std::vector<int> known(static_cast<size_t>(count));
  if (count > 0) archs(known.data());
  const bool exact = std::find(known.begin(), known.end(), compute_capability) != known.end();
  int newest = 0;
  for (int arch : known)
    if (arch <= compute_capability) newest = std::max(newest, arch);
  if (!exact && newest == 0)
    throw DeviceError("nvrtc: it knows no architecture up to " + std::to_string(compute_capability) +
                      "; a matching NVRTC is needed");
  const std::string arch = std::string("--gpu-architecture=") + (exact ? "sm_" : "compute_") + std::to_string(newest);
  void* program = nullptr;
  if (const int status = create(&program, source.c_str(), "fulmen.cu", 0, nullptr, nullptr))
    throw DeviceError("nvrtc: nvrtcCreateProgram gives status " + std::to_string(status));
  const char* flags[] = {arch.c_str(), "--std=c++17"};
  const int status = compile(program, 2, flags);
  std::string result;
  if (status == 0) {
    size_t size = 0;
    (exact ? image_size : ptx_size)(program, &size);
    result.resize(size);
    (exact ? image : ptx)(program, result.data());
  } else {
    size_t size = 0;
    log_size(program, &size);
    result.resize(size);
    log_text(program, result.data());
  }
  destroy(&program);
  if (status != 0) throw DeviceError("nvrtc: status " + std::to_string(status) + ": " + result);
  return result;
}

const Converter::Loaded& Converter::loaded(int device) {
  std::lock_guard lock(mutex_);
  if (devices_.size() <= static_cast<size_t>(device)) devices_.resize(static_cast<size_t>(device) + 1);
  std::unique_ptr<Loaded>& slot = devices_[static_cast<size_t>(device)];
  if (slot) return *slot;
  const cuda::Driver& driver = cuda::Driver::require();
  const std::string code = compile_cuda(source_text, driver.device(device).compute_capability, cudnn_folder_);
  void* module = driver.load_module(device, code.c_str());
  auto made = std::make_unique<Loaded>();
  static constexpr const char* names[] = {"mask2", "mask4", "copies", "close2", "close4", "open_lse", "sum_all"};
  for (int i = 0; i < function_count; ++i)
    made->functions[static_cast<size_t>(i)] = driver.function(device, module, names[i]);
  slot = std::move(made);
  return *slot;
}

void Converter::read_mask(int device, void* stream, const TensorForm& mask, const void* mask_data,
                          const TensorForm& bias, void* bias_data, uint8_t* open, const float* lse_from, float* lse_to,
                          int64_t lse_count) {
  KernelForm mask_form(mask), bias_form(bias);
  int kind = mask.dtype == DType::boolean ? 0 : 1;
  unsigned closed = minus_infinity(bias.dtype);
  long long rows = bias.dims[0] * bias.dims[1] * bias.dims[2], count = lse_count;
  void* arguments[] = {&mask_form, &mask_data, &kind, &bias_form, &bias_data, &closed, &open, &rows, &lse_from, &lse_to, &count};
  const int64_t blocks = (rows + 7) / 8 + (lse_count + 255) / 256;
  cuda::Driver::require().launch(device, loaded(device).functions[dtype_bytes(bias.dtype) == 2 ? mask2 : mask4],
                                 blocks_for(blocks, 1), 256, stream, arguments);
}

namespace {

// As the kernel's.
struct KernelCopy {
  KernelForm from, to;
  const void* source;
  void* target;
  long long count;
  int size;
  unsigned begin, blocks;
};
struct KernelCopies {
  KernelCopy copy[Converter::copies_together];
  int count;
};

KernelCopy kernel_copy(const Converter::Copy& copy) {
  const int64_t size = static_cast<int64_t>(dtype_bytes(copy.to.dtype)), together = 16 / size;
  // Rows that are whole pieces of 16 bytes on both sides move as such.
  const auto whole = [&](const TensorForm& form, const void* data) {
    if (reinterpret_cast<uintptr_t>(data) % 16 != 0 || form.dims[3] % together != 0 || form.strides[3] != 1) return false;
    for (int i = 0; i < 3; ++i)
      if (form.dims[i] > 1 && form.strides[i] % together != 0) return false;
    return true;
  };
  KernelCopy made{KernelForm(copy.from), KernelForm(copy.to), copy.source, copy.target, 0, static_cast<int>(size), 0, 0};
  if (whole(copy.from, copy.source) && whole(copy.to, copy.target)) {
    made.size = 16;
    for (KernelForm* form : {&made.from, &made.to}) {
      form->dims[3] /= together;
      for (int i = 0; i < 3; ++i) form->strides[i] /= together;
    }
  }
  made.count = made.to.dims[0] * made.to.dims[1] * made.to.dims[2] * made.to.dims[3];
  made.blocks = std::min(blocks_for(made.count, 256), 8192u);
  return made;
}

}  // namespace

void Converter::copy(int device, void* stream, std::initializer_list<Copy> wanted) {
  KernelCopies all{{}, 0};
  unsigned blocks = 0;
  for (const Copy& copy : wanted) {
    if (!copy.target) continue;
    FULMEN_CHECK(all.count < copies_together);
    KernelCopy made = kernel_copy(copy);
    made.begin = blocks;
    blocks += made.blocks;
    all.copy[all.count++] = made;
  }
  if (all.count == 0) return;
  void* arguments[] = {&all};
  cuda::Driver::require().launch(device, loaded(device).functions[copies], blocks, 256, stream, arguments);
}

void Converter::copy(int device, void* stream, const TensorForm& from, const void* from_data, const TensorForm& to,
                     void* to_data) {
  copy(device, stream, {Copy{from, from_data, to, to_data}});
}

void Converter::sum(int device, void* stream, const TensorForm& from, const void* from_data, const TensorForm& to,
                    void* to_data) {
  KernelForm from_form(from), to_form(to);
  int kind = to.dtype == DType::bf16 ? 1 : to.dtype == DType::f16 ? 2 : 3;
  void* arguments[] = {&from_form, &from_data, &to_form, &to_data, &kind};
  const int64_t tiles = to.dims[3] == 1 && from.dims[3] > 1 ? 1 : (to.dims[3] + 31) / 32;
  cuda::Driver::require().launch(device, loaded(device).functions[sum_all],
                                 blocks_for(to.dims[0] * to.dims[1] * to.dims[2] * tiles, 1), 256, stream, arguments);
}

void Converter::fill_zero(int device, void* stream, const TensorForm& form, void* data) {
  if (form.span() == form.element_count() && form.span_bytes() % 4 == 0 && reinterpret_cast<uintptr_t>(data) % 4 == 0)
    return cuda::Driver::require().fill_words(device, data, 0, form.span_bytes() / 4, stream);
  copy(device, stream, form, nullptr, form, data);
}

const void* Converter::constant_lengths(int device, int64_t batch, int64_t length) {
  const cuda::Driver& driver = cuda::Driver::require();
  std::lock_guard lock(mutex_);
  const void*& known = lengths_[{device, batch, length}];
  if (known) return known;
  const std::vector<int32_t> values(static_cast<size_t>(batch), static_cast<int32_t>(length));
  const size_t bytes = (values.size() * sizeof(int32_t) + 15) / 16 * 16;
  LengthChunk& chunk = chunks_[device];
  if (chunk.left < bytes) {
    const size_t size = std::max<size_t>(bytes, 1 << 16);
    chunk = {static_cast<char*>(driver.allocate_now(device, size)), size};
  }
  void* place = chunk.next;
  driver.copy_to_device(device, place, values.data(), values.size() * sizeof(int32_t), nullptr);
  driver.synchronize(device, nullptr);
  chunk.next += bytes;
  chunk.left -= bytes;
  return known = place;
}

void Converter::close_rows(int device, void* stream, const TensorForm& bias, const uint8_t* open,
                           const int32_t* lengths, const TensorForm& out, void* out_data, float* lse_data) {
  KernelForm bias_form(bias), out_form(out);
  long long rows = out.dims[0] * out.dims[1] * out.dims[2];
  void* arguments[] = {&bias_form, &open, &lengths, &out_form, &out_data, &lse_data, &rows};
  cuda::Driver::require().launch(device, loaded(device).functions[dtype_bytes(out.dtype) == 2 ? close2 : close4],
                                 blocks_for(rows, 128), 128, stream, arguments);
}

void Converter::open_lse(int device, void* stream, const float* from, float* to, int64_t count) {
  long long total = count;
  void* arguments[] = {&from, &to, &total};
  cuda::Driver::require().launch(device, loaded(device).functions[lse], blocks_for(count, 256), 256, stream, arguments);
}

}  // namespace fulmen::cudnn
