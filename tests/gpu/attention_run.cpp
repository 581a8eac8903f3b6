#include "tests/gpu/attention_run.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "core/error.h"
#include "core/half.h"

namespace fulmen::gpu_tests {

using cudnn::TensorForm;

namespace {

constexpr size_t margin = 512;  // canary bytes on each side
constexpr uint8_t canary = 0x5b;

double rounded(double value, DType dtype) {
  switch (dtype) {
    case DType::bf16: return static_cast<float>(bf16(static_cast<float>(value)));
    case DType::f16: return static_cast<float>(f16(static_cast<float>(value)));
    case DType::f32: return static_cast<float>(value);
    case DType::boolean: return value != 0;
    default: return value;
  }
}

void store(uint8_t* at, DType dtype, double value) {
  switch (dtype) {
    case DType::bf16: {
      const bf16 v(static_cast<float>(value));
      std::memcpy(at, &v, 2);
      break;
    }
    case DType::f16: {
      const f16 v(static_cast<float>(value));
      std::memcpy(at, &v, 2);
      break;
    }
    case DType::f32: {
      const auto v = static_cast<float>(value);
      std::memcpy(at, &v, 4);
      break;
    }
    case DType::boolean: *at = value != 0; break;
    case DType::i32: {
      const auto v = static_cast<int32_t>(value);
      std::memcpy(at, &v, 4);
      break;
    }
    default: {
      const auto v = static_cast<int64_t>(value);
      std::memcpy(at, &v, 8);
    }
  }
}

double load(const uint8_t* at, DType dtype) {
  if (dtype == DType::bf16) {
    bf16 v;
    std::memcpy(&v, at, 2);
    return static_cast<float>(v);
  }
  if (dtype == DType::f16) {
    f16 v;
    std::memcpy(&v, at, 2);
    return static_cast<float>(v);
  }
  float v = 0;
  std::memcpy(&v, at, 4);
  return v;
}

template <class F>
void each(const TensorForm& form, F&& body) {
  size_t index = 0;
  for (int64_t b = 0; b < form.dims[0]; ++b)
    for (int64_t h = 0; h < form.dims[1]; ++h)
      for (int64_t q = 0; q < form.dims[2]; ++q)
        for (int64_t k = 0; k < form.dims[3]; ++k)
          body(index++, static_cast<size_t>(b * form.strides[0] + h * form.strides[1] + q * form.strides[2] +
                                            k * form.strides[3]));
}

TensorForm form_of(const TensorType& type) {
  TensorForm form;
  form.dtype = type.dtype;
  for (size_t i = 0; i < 4; ++i) form.dims[i] = type.shape[i], form.strides[i] = type.strides[i];
  form.strides = cudnn::normal_strides(form.dims, form.strides);
  return form;
}

}  // namespace

struct AttentionRun::Buffer {
  TensorForm form;
  size_t bytes = 0;
  uint8_t* memory = nullptr;  // with margins
  size_t offset = margin;
  void* data() const { return memory + offset; }
};

AttentionRun::AttentionRun(const cudnn::Context& context, SdpaCall call, cudnn::SdpaLayouts layouts, int device)
    : context_(context), call_(std::move(call)), layouts_(std::move(layouts)), device_(device) {
  const cuda::Driver& driver = cuda::Driver::require();
  target_ = driver.target(device);
  claim_ = context.claim_sdpa(call_, target_, layouts_);
  if (const auto* refusal = std::get_if<Refusal>(claim_.get())) {
    refusal_ = refusal->reason;
    return;
  }
  kernel_ = context.kernel(plan(), target_);
  problem_ = &static_cast<const cudnn::ClaimedProblem*>(plan().data.get())->problem;
  own_stream_ = stream_ = driver.make_stream(device);
  if (kernel_->workspace_bytes() > 0) workspace_ = driver.allocate_now(device, kernel_->workspace_bytes());
  const cudnn::Problem& p = *problem_;
  make("query", form_of(call_.query));
  make("key", form_of(call_.key));
  make("value", form_of(call_.value));
  if (call_.mask) make("mask", form_of(*call_.mask));
  if (call_.key_lengths) make("key_lengths", {DType::i32, {call_.batch(), 1, 1, 1}, {1, 1, 1, 1}});
  if (call_.seed) make("seed", {DType::i64, {2, 1, 1, 1}, {1, 1, 1, 1}});
  make("out", p.out);
  if (!call_.training) return;
  make("lse", p.lse);
  make("out_grad", p.out_grad_in);
  if (call_.query.requires_grad) make("query_grad", p.query_grad);
  if (call_.key.requires_grad) make("key_grad", p.key_grad);
  if (call_.value.requires_grad) make("value_grad", p.value_grad);
  if (p.bias_gradient) make("mask_grad", p.mask_grad);
}

AttentionRun::~AttentionRun() {
  const cuda::Driver& driver = cuda::Driver::require();
  for (auto& [name, buffer] : buffers_) driver.release_now(device_, buffer->memory);
  if (workspace_) driver.release_now(device_, workspace_);
  if (own_stream_) driver.destroy_stream(device_, own_stream_);
}

const Plan& AttentionRun::plan() const { return std::get<Plan>(*claim_); }

AttentionRun::Buffer& AttentionRun::buffer(const std::string& name) { return *buffers_.at(name); }

void AttentionRun::make(const std::string& name, const TensorForm& form, size_t offset_bytes) {
  auto buffer = std::make_unique<Buffer>();
  buffer->form = form;
  buffer->bytes = form.span_bytes();
  buffer->offset = margin + offset_bytes;
  buffer->memory = static_cast<uint8_t*>(
      cuda::Driver::require().allocate_now(device_, buffer->bytes + 2 * margin + offset_bytes));
  buffers_[name] = std::move(buffer);
}

void AttentionRun::upload(const std::string& name, const std::vector<double>& values) {
  Buffer& b = buffer(name);
  std::vector<uint8_t> bytes(b.bytes + 2 * margin, canary);
  const size_t size = dtype_bytes(b.form.dtype);
  if (!values.empty())
    each(b.form, [&](size_t i, size_t at) { store(bytes.data() + margin + at * size, b.form.dtype, values[i]); });
  cuda::Driver::require().copy_to_device(device_, b.memory + b.offset - margin, bytes.data(), bytes.size(), stream_);
  cuda::Driver::require().synchronize(device_, stream_);
}

std::vector<double> AttentionRun::download(const std::string& name, std::string& trouble) {
  Buffer& b = buffer(name);
  std::vector<uint8_t> bytes(b.bytes + 2 * margin);
  cuda::Driver::require().copy_to_host(device_, bytes.data(), b.memory + b.offset - margin, bytes.size(), stream_);
  cuda::Driver::require().synchronize(device_, stream_);
  const size_t size = dtype_bytes(b.form.dtype);
  std::vector<double> values(static_cast<size_t>(b.form.element_count()));
  std::vector<bool> owned(bytes.size());
  each(b.form, [&](size_t i, size_t at) {
    values[i] = load(bytes.data() + margin + at * size, b.form.dtype);
    for (size_t k = 0; k < size; ++k) owned[margin + at * size + k] = true;
  });
  for (size_t i = 0; i < bytes.size(); ++i)
    if (!owned[i] && bytes[i] != canary) {
      trouble += name + ": byte " + std::to_string(static_cast<int64_t>(i) - static_cast<int64_t>(margin)) +
                 " outside its elements was written; ";
      break;
    }
  return values;
}

void AttentionRun::draw(const Data& data) {
  std::mt19937_64 random(data.seed);
  std::normal_distribution<double> normal;
  const auto numbers = [&](const TensorType& type, double scale) {
    std::vector<double> values(static_cast<size_t>(type.element_count()));
    const TensorForm form = form_of(type);
    // Elements that share memory (stride 0) share their number.
    std::map<size_t, double> shared;
    const bool repeats = std::any_of(type.strides.begin(), type.strides.end(), [](int64_t s) { return s == 0; });
    each(form, [&](size_t i, size_t at) {
      if (repeats) {
        const auto [where, added] = shared.try_emplace(at, 0.0);
        if (added) where->second = rounded(normal(random) * scale, type.dtype);
        values[i] = where->second;
      } else {
        values[i] = rounded(normal(random) * scale, type.dtype);
      }
    });
    return values;
  };
  auto& query = values_["query"] = numbers(call_.query, data.query_scale);
  auto& key = values_["key"] = numbers(call_.key, data.key_scale);
  if (data.shift != 0 && call_.scale != 0) {
    for (size_t i = 0; i < query.size(); i += static_cast<size_t>(call_.head_dim())) query[i] = 1;
    for (size_t i = 0; i < key.size(); i += static_cast<size_t>(call_.head_dim()))
      key[i] = rounded(data.shift / call_.scale, call_.key.dtype);
  }
  values_["value"] = numbers(call_.value, 1.0);
  if (call_.mask) {
    auto& mask = values_["mask"] = numbers(*call_.mask, 1.0);
    const size_t row = static_cast<size_t>(call_.mask->shape[3]);
    std::uniform_real_distribution<double> uniform;
    const bool boolean = call_.mask->dtype == DType::boolean;
    for (size_t i = 0; i < mask.size(); ++i) {
      bool closed = uniform(random) < data.closed;
      if (static_cast<int>(i / row) < data.closed_rows || data.all_closed) closed = true;
      if (boolean) mask[i] = !closed;
      else if (closed && !call_.mask->requires_grad) mask[i] = -std::numeric_limits<double>::infinity();
    }
  }
  if (call_.key_lengths) {
    lengths_.clear();
    for (int64_t b = 0; b < call_.batch(); ++b)
      lengths_.push_back(static_cast<int32_t>(data.all_closed ? 0 : 1 + random() % static_cast<uint64_t>(call_.key_len())));
    if (data.closed_rows > 0) lengths_[0] = 0;
    values_["key_lengths"].assign(lengths_.begin(), lengths_.end());
  }
  if (call_.seed) values_["seed"] = {static_cast<double>(1234 + data.seed), 8.0};
  if (call_.training) {
    TensorType grad = call_.query;
    grad.shape = {call_.batch(), call_.heads(), call_.query_len(), call_.value_dim()};
    const TensorForm& form = buffer("out_grad").form;
    grad.strides.assign(form.strides.begin(), form.strides.end());
    values_["out_grad"] = numbers(grad, data.grad_scale);
    if (data.grad_is_ones) std::fill(values_["out_grad"].begin(), values_["out_grad"].end(), 1.0);
  }
  for (const auto& [name, values] : values_) upload(name, values);
  for (const auto& [name, b] : buffers_)
    if (!values_.count(name)) upload(name, {});
}

void AttentionRun::enqueue(bool forward, bool backward) {
  const auto data = [&](const char* name) -> void* {
    const auto at = buffers_.find(name);
    return at == buffers_.end() ? nullptr : at->second->data();
  };
  cudnn::SdpaKernel::Forward f{data("query"), data("key"), data("value"), data("mask"), data("key_lengths"),
                               data("seed"),  data("out"), data("lse")};
  const RunContext context{stream_, device_, workspace_};
  if (forward) kernel_->run_forward(context, f, call_.scale);
  if (backward && call_.training)
    kernel_->run_backward(context,
                          {f, data("out_grad"), data("query_grad"), data("key_grad"), data("value_grad"), data("mask_grad")},
                          call_.scale);
}

std::vector<uint8_t> AttentionRun::run_again(bool clear_first) {
  const cuda::Driver& driver = cuda::Driver::require();
  const std::vector<std::string> results{"out", "lse", "query_grad", "key_grad", "value_grad", "mask_grad"};
  if (clear_first)
    for (const std::string& name : results)
      if (buffers_.count(name)) upload(name, {});
  enqueue();
  std::vector<uint8_t> all;
  for (const std::string& name : results) {
    if (!buffers_.count(name)) continue;
    const Buffer& b = buffer(name);
    const size_t at = all.size();
    all.resize(at + b.bytes);
    driver.copy_to_host(device_, all.data() + at, b.data(), b.bytes, stream_);
    driver.synchronize(device_, stream_);
  }
  return all;
}

Outcome AttentionRun::compare(const Data& data) {
  Outcome outcome;
  if (!claimed()) {
    outcome.refused = refusal_;
    return outcome;
  }
  draw(data);
  enqueue();
  // The bias of the reference holds every way of closing a key.
  const int64_t batch = call_.batch(), heads = call_.heads(), queries = call_.query_len(), keys = call_.key_len();
  std::vector<double> bias(static_cast<size_t>(batch * heads * queries * keys));
  const int64_t shift = call_.lower_right ? keys - queries : 0;
  size_t at = 0;
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t i = 0; i < queries; ++i)
        for (int64_t j = 0; j < keys; ++j, ++at) {
          const int64_t d = j - i - shift;
          bool open = !(call_.is_causal && d > 0) && !(call_.window_left >= 0 && d < -call_.window_left) &&
                      !(call_.window_right >= 0 && d > call_.window_right);
          if (call_.key_lengths && j >= lengths_[static_cast<size_t>(b)]) open = false;
          if (call_.mask) {
            const Dims& s = call_.mask->shape;
            const double m = values_["mask"][static_cast<size_t>(
                ((((s[0] == 1 ? 0 : b) * s[1] + (s[1] == 1 ? 0 : h)) * s[2] + (s[2] == 1 ? 0 : i)) * s[3]) +
                (s[3] == 1 ? 0 : j))];
            if (call_.mask->dtype == DType::boolean) open = open && m != 0;
            else bias[at] = m;
          }
          if (!open) bias[at] = -std::numeric_limits<double>::infinity();
        }
  const Reference expected = reference(call_, values_["query"], values_["key"], values_["value"], bias, {},
                                       call_.training ? values_["out_grad"] : std::vector<double>{}, device_);
  // Right is: within 4 roundings of the result's size; or twice the error of the plain decomposition, whose
  // probabilities and their gradients are stored in the call's dtype; or, for gradients that are differences of larger
  // terms, 2 roundings of those terms; in f16 a gradient of a score below 2^-14 is rounded to a
  // multiple of 2^-24 whatever its size; that cudnn rounds it after the scale is applied fits the errors seen.
  const Reference plain = call_.query.dtype == DType::f32
                              ? expected
                              : reference(call_, values_["query"], values_["key"], values_["value"], bias, {},
                                          call_.training ? values_["out_grad"] : std::vector<double>{}, device_,
                                          call_.query.dtype);
  const double unit = call_.query.dtype == DType::bf16 ? 1.0 / 256 : call_.query.dtype == DType::f16 ? 1.0 / 2048 : 1e-6;
  const auto rms = [](const std::vector<double>& v) {
    double sum = 0;
    for (double x : v) sum += std::isfinite(x) ? x * x : 0;
    return std::sqrt(sum / static_cast<double>(std::max<size_t>(1, v.size())));
  };
  const double rms_q = rms(values_["query"]), rms_k = rms(values_["key"]), rms_v = rms(values_["value"]),
               rms_g = call_.training ? rms(values_["out_grad"]) : 0;
  const auto judge = [&](const std::string& name, const std::vector<double>& wanted, const std::vector<double>& decomposed,
                         double floor, double cancelled = 0, double spaced = 0) {
    std::string trouble;
    const std::vector<double> found = download(name, trouble);
    double error = 0, size = 0, plain_error = 0;
    for (size_t i = 0; i < wanted.size(); ++i) {
      if (std::isinf(wanted[i]) || std::isinf(found[i]) || std::isnan(found[i])) {
        if (found[i] != wanted[i]) {
          trouble += name + "[" + std::to_string(i) + "] is " + std::to_string(found[i]) + ", wanted " +
                     std::to_string(wanted[i]) + "; ";
          break;
        }
        continue;
      }
      const double difference = found[i] - wanted[i];
      error += difference * difference;
      size += wanted[i] * wanted[i];
      plain_error += (decomposed[i] - wanted[i]) * (decomposed[i] - wanted[i]);
    }
    const double count = static_cast<double>(std::max<size_t>(1, wanted.size()));
    const double scale = std::max(std::sqrt(size / count), floor);
    const double relative = scale > 0 ? std::sqrt(error / count) / scale : std::sqrt(error / count);
    outcome.error[name] = relative;
    const double by_plain = scale > 0 ? 2 * std::sqrt(plain_error / count) / scale : 0;
    const double by_terms = scale > 0 ? (2 * unit * cancelled + spaced) / scale : 0;
    const double allowed = std::max({4 * unit, by_plain, by_terms});
    if (!(relative <= allowed))
      trouble += name + ": relative error " + std::to_string(relative) + ", allowed " + std::to_string(allowed) +
                 " (twice the plain decomposition's: " + std::to_string(by_plain) + ", of the terms: " +
                 std::to_string(by_terms) + "); ";
    outcome.trouble += trouble;
  };
  const double dims = std::sqrt(static_cast<double>(call_.value_dim()));
  judge("out", expected.out, plain.out, 1e-3 * rms_v);
  if (call_.training) {
    judge("lse", expected.lse, expected.lse, 1.0);
    // A gradient that is 0 in exact arithmetic is the difference of rounded terms: judged against their size.
    const double score_grad = 0.05 * rms_g * rms_v * dims;
    const double spacing = call_.query.dtype == DType::f16 ? 0.6 * 0x1p-24 : 0;  // two roundings to the nearest multiple
    const double rows = static_cast<double>(queries * (heads / call_.key_heads()));
    const double by_scale = std::max(1.0, std::abs(call_.scale));
    const double spaced_q = spacing * std::sqrt(static_cast<double>(keys)) * rms_k * by_scale,
                 spaced_k = spacing * std::sqrt(rows) * rms_q * by_scale;
    if (buffers_.count("query_grad")) judge("query_grad", expected.query_grad, plain.query_grad, score_grad * rms_k * std::abs(call_.scale), rms(expected.query_size), spaced_q);
    if (buffers_.count("key_grad")) judge("key_grad", expected.key_grad, plain.key_grad, score_grad * rms_q * std::abs(call_.scale), rms(expected.key_size), spaced_k);
    if (buffers_.count("value_grad")) judge("value_grad", expected.value_grad, plain.value_grad, 1e-3 * rms_g, 0, spacing * std::sqrt(rows) * rms_g);
    if (buffers_.count("mask_grad")) {
      const Dims& s = call_.mask->shape;
      const auto count = static_cast<size_t>(element_count(s));
      std::vector<double> reduced(count), decomposed(count), squares(count);
      size_t from = 0;
      for (int64_t b = 0; b < batch; ++b)
        for (int64_t h = 0; h < heads; ++h)
          for (int64_t i = 0; i < queries; ++i)
            for (int64_t j = 0; j < keys; ++j, ++from) {
              const auto to = static_cast<size_t>(
                  ((((s[0] == 1 ? 0 : b) * s[1] + (s[1] == 1 ? 0 : h)) * s[2] + (s[2] == 1 ? 0 : i)) * s[3]) + (s[3] == 1 ? 0 : j));
              reduced[to] += expected.bias_grad[from];
              decomposed[to] += plain.bias_grad[from];
              const double row = expected.row_size[from / static_cast<size_t>(keys)];
              // Keys of a row share the rounding of its sum.
              const double shared = s[3] != 1 ? expected.probability[from] * row : j == 0 ? row : 0.0;
              squares[to] += expected.score_size[from] * expected.score_size[from] + shared * shared;
            }
      double cancelled = 0;
      for (double x : squares) cancelled += x;
      judge("mask_grad", reduced, decomposed, score_grad / static_cast<double>(keys),
            std::sqrt(cancelled / static_cast<double>(std::max<size_t>(1, count))),
            spacing * std::sqrt(static_cast<double>(from) / static_cast<double>(std::max<size_t>(1, count))) *
                (call_.scale != 0 ? std::max(1.0, 1.0 / std::abs(call_.scale)) : 1.0));
    }
  }
  std::string input_trouble;
  for (const char* name : {"query", "key", "value"}) download(name, input_trouble);
  outcome.trouble += input_trouble;
  return outcome;
}

AttentionRun::Times AttentionRun::time(int rounds) {
  const cuda::Driver& driver = cuda::Driver::require();
  void *begin = driver.make_event(device_), *middle = driver.make_event(device_), *end = driver.make_event(device_);
  std::vector<double> forward, backward, both;
  uint32_t seed = 1;
  for (const char* name : {"query", "key", "value", "mask", "out_grad"})
    if (const auto at = buffers_.find(name); at != buffers_.end())
      fill_noise(device_, stream_, at->second->form, at->second->data(), ++seed);
  if (call_.seed) upload("seed", {7, 8});
  if (call_.key_lengths) upload("key_lengths", std::vector<double>(static_cast<size_t>(call_.batch()), static_cast<double>(call_.key_len())));
  for (int i = 0; i < 3; ++i) enqueue();
  driver.synchronize(device_, stream_);
  for (int i = 0; i < rounds; ++i) {
    driver.record(device_, begin, stream_);
    enqueue(true, false);
    driver.record(device_, middle, stream_);
    enqueue(false, true);
    driver.record(device_, end, stream_);
    forward.push_back(driver.milliseconds(device_, begin, middle));
    backward.push_back(driver.milliseconds(device_, middle, end));
    both.push_back(driver.milliseconds(device_, begin, end));
  }
  for (void* event : {begin, middle, end}) driver.destroy_event(device_, event);
  const auto median = [](std::vector<double>& v) {
    std::nth_element(v.begin(), v.begin() + static_cast<std::ptrdiff_t>(v.size() / 2), v.end());
    return v[v.size() / 2];
  };
  return {median(forward), median(backward), median(both)};
}

}  // namespace fulmen::gpu_tests
