#include "executors/cudnn/problem.h"

#include <algorithm>
#include <bit>
#include <numeric>

#include "core/error.h"

namespace fulmen::cudnn {

namespace {

Sizes four(const Dims& dims) {
  FULMEN_CHECK(dims.size() == 4);
  return {dims[0], dims[1], dims[2], dims[3]};
}

Sizes contiguous(const Sizes& dims) { return {dims[1] * dims[2] * dims[3], dims[2] * dims[3], dims[3], 1}; }

int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// The library loads 16 bytes at a time.
int64_t vector_elements(DType dtype) { return 16 / static_cast<int64_t>(dtype_bytes(dtype)); }

// Last stride 1, the others multiples of a vector, none of them 0 where there is more than one element.
bool fits_as_is(const TensorForm& form, bool may_repeat) {
  if (form.dims[3] > 1 && form.strides[3] != 1) return false;
  for (int i = 0; i < 3; ++i) {
    if (form.dims[i] == 1) continue;
    if (form.strides[i] < 0 || form.strides[i] % vector_elements(form.dtype) != 0) return false;
    if (form.strides[i] == 0 && !may_repeat) return false;
  }
  return true;
}

// Rows padded to a multiple of a vector, so that every row starts aligned.
TensorForm padded_rows(DType dtype, const Sizes& dims) {
  const int64_t row = dims[3] == 1 ? 1 : round_up(dims[3], vector_elements(dtype));
  return {dtype, dims, normal_strides(dims, {dims[1] * dims[2] * row, dims[2] * row, row, 1})};
}

TensorForm form_of(const TensorType& type) {
  TensorForm form{type.dtype, four(type.shape), four(type.strides)};
  form.strides = normal_strides(form.dims, form.strides);
  return form;
}

TensorForm result_form(DType dtype, const Sizes& dims, const std::optional<Dims>& wanted, const TensorForm& like) {
  TensorForm form{dtype, dims, wanted ? four(*wanted) : dense_strides_like(dims, like)};
  form.strides = normal_strides(dims, form.strides);
  return form;
}

std::string place(const char* what, const TensorForm& form) {
  return std::string(what) + " " + to_string(Dims(form.dims.begin(), form.dims.end()));
}

void read_mask(Problem& problem, const SdpaCall& call, const SdpaLayouts& layouts) {
  const TensorType& mask = *call.mask;
  TensorForm in = form_of(mask);
  problem.bias_gradient = call.training && mask.requires_grad && mask.dtype != DType::boolean;
  problem.mask_in = in;
  // A dimension expanded by stride 0 holds one value; where no gradient wants the full shape, the library reads it as
  // the broadcast it is.
  TensorForm read = in;
  if (!problem.bias_gradient)
    for (int i = 0; i < 3; ++i)
      if (read.strides[i] == 0) read.dims[i] = 1;
  // The library's masks have a column for every key.
  read.dims[3] = problem.key_len();
  read.strides = normal_strides(read.dims, read.strides);
  const bool keys_repeat = in.dims[3] != read.dims[3];
  if (keys_repeat) read.strides[3] = 0;
  if (mask.dtype == DType::boolean) {
    problem.bias = padded_rows(problem.query.dtype, read.dims);
    problem.steps.push_back("bool mask -> additive bias of 0 and -inf, " + std::string(dtype_name(problem.query.dtype)) +
                            place("", *problem.bias));
  } else if (keys_repeat || !fits_as_is(read, false)) {
    problem.bias = padded_rows(mask.dtype, read.dims);
    problem.steps.push_back("mask copied, rows aligned to 16 bytes: " + place("bias", *problem.bias));
  } else {
    problem.bias = read;
    problem.mask_in = read;
  }
  if (!problem.bias_gradient) return;
  // The library writes packed rows only.
  problem.bias_grad = {mask.dtype, problem.bias->dims, normal_strides(problem.bias->dims, contiguous(problem.bias->dims))};
  problem.mask_grad = {mask.dtype, in.dims, layouts.mask_grad ? four(*layouts.mask_grad) : contiguous(in.dims)};
  problem.mask_grad.strides = normal_strides(in.dims, problem.mask_grad.strides);
  if (problem.sums_bias_grad())
    problem.steps.push_back("mask gradient summed over the keys that share an element");
  else if (!(problem.bias_grad == problem.mask_grad))
    problem.steps.push_back("mask gradient copied from packed rows into the mask's layout");
}

}  // namespace

void repeat_mask_row(Problem& problem) {
  FULMEN_CHECK(problem.bias && problem.bias->dims[2] == 1);
  const bool converts = problem.converts_mask();
  problem.bias->dims[2] = problem.query_len();
  problem.bias->strides[2] = 0;
  if (!converts) problem.mask_in = problem.bias;
  if (!problem.bias_gradient) return;
  const Sizes& dims = problem.bias->dims;
  problem.bias_grad = {problem.bias_grad.dtype, dims, normal_strides(dims, contiguous(dims))};
}

void expand_mask_rows(Problem& problem) {
  FULMEN_CHECK(problem.bias && (problem.bias->dims[2] == 1 || problem.bias->strides[2] == 0));
  Sizes dims = problem.bias->dims;
  dims[2] = problem.query_len();
  problem.bias = padded_rows(problem.bias->dtype, dims);
  if (!problem.bias_gradient) return;
  problem.bias_grad = {problem.bias_grad.dtype, dims, normal_strides(dims, contiguous(dims))};
}

int64_t length_bucket(const Problem& problem) {
  int64_t bucket = 512;
  while (bucket < problem.query_len() || bucket < problem.key_len()) bucket *= 2;
  return bucket;
}

std::optional<Problem> shared_problem(const Problem& problem, int64_t bucket) {
  const bool window = problem.window_left >= 0 || problem.window_right >= 0;
  if (problem.bias || problem.key_lengths || problem.lower_right || window) return std::nullopt;
  Problem shared = problem;
  for (TensorForm* form : {&shared.query, &shared.key, &shared.value, &shared.out, &shared.lse, &shared.out_grad,
                           &shared.query_grad, &shared.key_grad, &shared.value_grad}) {
    form->dims[2] = bucket;
    form->strides = normal_strides(form->dims, contiguous(form->dims));
  }
  shared.out_grad_in = shared.out_grad;
  shared.key_lengths = true;
  shared.full_lengths = false;
  return shared;
}

std::vector<int64_t> family_words(const Problem& p) {
  const int64_t flags = p.causal | p.lower_right << 1 | p.training << 2 | p.deterministic << 3 | p.bias.has_value() << 4 |
                        p.key_lengths << 5;
  return {flags,
          static_cast<int64_t>(p.query.dtype),
          p.batch(),
          p.heads(),
          p.key_heads(),
          p.query.dims[3],
          p.value.dims[3],
          p.window_left,
          p.window_right,
          std::bit_cast<int64_t>(p.dropout_p)};
}

TensorForm stored_form(TensorForm form) {
  for (int i = 0; i < 4; ++i)
    if (form.strides[i] == 0) form.dims[i] = 1;
  return form;
}

int64_t TensorForm::span() const {
  int64_t span = 1;
  for (int i = 0; i < 4; ++i) span += (dims[i] - 1) * strides[i];
  return span;
}

Sizes normal_strides(const Sizes& dims, const Sizes& strides) {
  Sizes normal = strides;
  for (int i = 3; i >= 0; --i)
    if (dims[i] == 1) normal[i] = i == 3 ? 1 : std::max<int64_t>(1, dims[i + 1] * normal[i + 1]);
  return normal;
}

Sizes dense_strides_like(const Sizes& dims, const TensorForm& like) {
  // Outer dimensions by stride, the largest outermost; ties keep their order.
  std::array<int, 3> order{0, 1, 2};
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return like.strides[a] > like.strides[b]; });
  if (std::any_of(order.begin(), order.end(), [&](int i) { return like.dims[i] > 1 && like.strides[i] == 0; }))
    order = {0, 1, 2};
  Sizes strides{};
  strides[3] = 1;
  int64_t next = dims[3];
  for (int k = 2; k >= 0; --k) {
    strides[order[k]] = next;
    next *= dims[order[k]];
  }
  return normal_strides(dims, strides);
}

Problem problem_of(const SdpaCall& call, const SdpaLayouts& layouts) {
  Problem problem;
  problem.query = form_of(call.query);
  problem.key = form_of(call.key);
  problem.value = form_of(call.value);
  const DType dtype = call.query.dtype;
  const Sizes out_dims{call.batch(), call.heads(), call.query_len(), call.value_dim()};
  problem.out = result_form(dtype, out_dims, layouts.out, problem.query);
  problem.lse = {DType::f32, {out_dims[0], out_dims[1], out_dims[2], 1}, {}};
  problem.lse.strides = contiguous(problem.lse.dims);
  problem.causal = call.is_causal;
  problem.window_left = call.window_left;
  problem.window_right = call.window_right;
  problem.lower_right = call.lower_right && (call.is_causal || call.window_left >= 0 || call.window_right >= 0);
  problem.dropout_p = call.dropout_p;
  problem.key_lengths = call.key_lengths.has_value();
  problem.training = call.training;
  problem.deterministic = call.deterministic;
  if (call.training) {
    problem.query_grad = result_form(dtype, problem.query.dims, layouts.query_grad, problem.query);
    problem.key_grad = result_form(dtype, problem.key.dims, layouts.key_grad, problem.key);
    problem.value_grad = result_form(dtype, problem.value.dims, layouts.value_grad, problem.value);
    problem.out_grad_in = problem.out;
    if (layouts.out_grad) problem.out_grad_in.strides = normal_strides(out_dims, four(*layouts.out_grad));
    problem.out_grad = problem.out_grad_in;
    if (!fits_as_is(problem.out_grad_in, false)) {
      problem.out_grad = problem.out;
      problem.steps.push_back("gradient of the result copied into the result's layout: its strides are " +
                              to_string(Dims(problem.out_grad_in.strides.begin(), problem.out_grad_in.strides.end())));
    }
  }
  if (call.mask) read_mask(problem, call, layouts);
  return problem;
}

namespace {

void append_form(std::vector<int64_t>& words, const TensorForm& form) {
  words.push_back(static_cast<int64_t>(form.dtype));
  words.insert(words.end(), form.dims.begin(), form.dims.end());
  words.insert(words.end(), form.strides.begin(), form.strides.end());
}

void append_type(std::vector<int64_t>& words, const TensorType& type) {
  words.push_back(static_cast<int64_t>(type.dtype) | static_cast<int64_t>(type.device.kind) << 8 |
                  static_cast<int64_t>(type.requires_grad) << 16 | static_cast<int64_t>(type.device.index) << 24 |
                  static_cast<int64_t>(type.shape.size()) << 48);
  words.insert(words.end(), type.shape.begin(), type.shape.end());
  words.insert(words.end(), type.strides.begin(), type.strides.end());
}

void append_optional(std::vector<int64_t>& words, const std::optional<TensorType>& type) {
  if (!type) return words.push_back(-1);
  append_type(words, *type);
}

void append_optional(std::vector<int64_t>& words, const std::optional<Dims>& dims) {
  if (!dims) return words.push_back(-1);
  words.push_back(static_cast<int64_t>(dims->size()));
  words.insert(words.end(), dims->begin(), dims->end());
}

}  // namespace

std::vector<int64_t> plan_words(const Problem& p, bool backward) {
  std::vector<int64_t> words;
  words.reserve(128);
  const int64_t flags = p.causal | p.lower_right << 1 | p.passes_lengths(backward) << 2 | p.training << 3 |
                        p.deterministic << 4 | p.bias_gradient << 5 | p.bias.has_value() << 6;
  words.insert(words.end(), {flags, p.window_left, p.window_right, std::bit_cast<int64_t>(p.dropout_p)});
  for (const TensorForm* form : {&p.query, &p.key, &p.value, &p.out}) append_form(words, *form);
  if (p.bias) append_form(words, *p.bias);
  if (p.training) {
    for (const TensorForm* form : {&p.out_grad, &p.query_grad, &p.key_grad, &p.value_grad}) append_form(words, *form);
    if (p.bias_gradient) append_form(words, p.bias_grad);
  }
  return words;
}

void append_call_words(std::vector<int64_t>& words, const SdpaCall& c, const SdpaLayouts& layouts) {
  words.push_back(c.is_causal | c.lower_right << 1 | c.training << 2 | c.deterministic << 3);
  words.insert(words.end(), {c.window_left, c.window_right, std::bit_cast<int64_t>(c.dropout_p),
                             std::bit_cast<int64_t>(c.softcap),
                             // The scale is a run-time value; only what the rules ask of it counts.
                             static_cast<int64_t>(c.scale - c.scale == 0.0) + 2 * static_cast<int64_t>(static_cast<float>(c.scale) > 0.0f)});
  append_type(words, c.query);
  append_type(words, c.key);
  append_type(words, c.value);
  for (const auto* type : {&c.mask, &c.sink, &c.alibi_slopes, &c.query_offsets, &c.key_offsets, &c.key_lengths, &c.seed})
    append_optional(words, *type);
  for (const auto* dims : {&layouts.out, &layouts.out_grad, &layouts.query_grad, &layouts.key_grad, &layouts.value_grad,
                           &layouts.mask_grad})
    append_optional(words, *dims);
}

uint64_t hash_words(const std::vector<int64_t>& words) {
  uint64_t hash = 0x9e3779b97f4a7c15ull;
  for (int64_t word : words) {
    hash = (hash ^ static_cast<uint64_t>(word)) * 0xff51afd7ed558ccdull;
    hash ^= hash >> 32;
  }
  return hash;
}

}  // namespace fulmen::cudnn
