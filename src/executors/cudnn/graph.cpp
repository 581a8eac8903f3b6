// cudnn-frontend's graph API behind graph.h. The frontend loads cuDNN's functions through one handle
// (NV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING), which it wants as a global.
#include "executors/cudnn/graph.h"

#include <cudnn_frontend.h>

#include <algorithm>
#include <charconv>

#include "core/error.h"
#include "executors/cudnn/library.h"

namespace cudnn_frontend {
void* cudnn_dlhandle = nullptr;
}

namespace fulmen::cudnn {

namespace {

namespace fe = cudnn_frontend;
using Tensor = std::shared_ptr<fe::graph::Tensor_attributes>;

fe::DataType_t library_dtype(DType dtype) {
  switch (dtype) {
    case DType::f16: return fe::DataType_t::HALF;
    case DType::bf16: return fe::DataType_t::BFLOAT16;
    case DType::f32: return fe::DataType_t::FLOAT;
    case DType::i32: return fe::DataType_t::INT32;
    case DType::i64: return fe::DataType_t::INT64;
    default: return fe::DataType_t::NOT_SET;
  }
}

fe::graph::Tensor_attributes attributes(const char* name, Slot slot, const TensorForm& form) {
  fe::graph::Tensor_attributes tensor;
  tensor.set_name(name)
      .set_uid(slot)
      .set_dim({form.dims.begin(), form.dims.end()})
      .set_stride({form.strides.begin(), form.strides.end()})
      .set_data_type(library_dtype(form.dtype));
  return tensor;
}

void describe_output(const Tensor& tensor, const char* name, Slot slot, const TensorForm& form) {
  tensor->set_name(name)
      .set_uid(slot)
      .set_output(true)
      .set_dim({form.dims.begin(), form.dims.end()})
      .set_stride({form.strides.begin(), form.strides.end()})
      .set_data_type(library_dtype(form.dtype));
}

// The library's words on one line: the first status and its reason where there is one, else the beginning.
std::string one_line(std::string text) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  if (const size_t status = text.find("CUDNN_STATUS_"); status != std::string::npos) {
    const size_t end = text.find(" Warning:", status);
    text = text.substr(status, end == std::string::npos ? end : end - status);
  }
  if (const size_t tag = text.find("[cudnn_frontend] Error: "); tag == 0) text.erase(0, 24);
  constexpr size_t longest = 240;
  if (text.size() > longest) text = text.substr(0, longest) + "...";
  while (!text.empty() && text.back() == ' ') text.pop_back();
  return text;
}

bool contains(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

// Only "not supported" is a refusal. The frontend flattens cuDNN's status into text in places, so the text decides
// there.
Verdict verdict_of(fe::error_code_t code, const std::string& message) {
  if (contains(message, "PREREQUISITE_MISSING") || contains(message, "SUBLIBRARY_UNAVAILABLE") ||
      contains(message, "SUBLIBRARY_LOADING_FAILED"))
    return Verdict::prerequisite_missing;
  if (contains(message, "INTERNAL_ERROR") || contains(message, "ALLOCATION_FAILED") ||
      contains(message, "EXECUTION_FAILED_CUDA"))
    return Verdict::failed;
  switch (code) {
    case fe::error_code_t::GRAPH_NOT_SUPPORTED:
    case fe::error_code_t::HEURISTIC_QUERY_FAILED:
    case fe::error_code_t::GRAPH_EXECUTION_PLAN_CREATION_FAILED: return Verdict::refused;
    default: return contains(message, "NOT_SUPPORTED") ? Verdict::refused : Verdict::failed;
  }
}

TensorForm single(DType dtype) { return {dtype, {1, 1, 1, 1}, {1, 1, 1, 1}}; }

}  // namespace

struct Graph::State {
  fe::graph::Graph graph;
  Side side;
  std::vector<int64_t> uids;  // of the built plan's variant pack, sorted
  bool restored = false;

  void add_forward(const Problem& p);
  void add_backward(const Problem& p);
  template <class Options>
  void add_options(Options& options, const Problem& p, bool backward);
  fe::error_t built();
};

// What both directions share: scale, bias, lengths, band and dropout.
template <class Options>
void Graph::State::add_options(Options& options, const Problem& p, bool backward) {
  auto scale = attributes("scale", slot_scale, single(DType::f32));
  scale.set_is_pass_by_value(true);
  options.set_attn_scale(graph.tensor(scale));
  if (p.bias) options.set_bias(graph.tensor(attributes("bias", slot_bias, *p.bias)));
  if (p.passes_lengths(backward)) {
    const TensorForm lengths{DType::i32, {p.batch(), 1, 1, 1}, {1, 1, 1, 1}};
    options.set_padding_mask(true)
        .set_seq_len_q(graph.tensor(attributes("query_lengths", slot_query_lengths, lengths)))
        .set_seq_len_kv(graph.tensor(attributes("key_lengths", slot_key_lengths, lengths)));
  }
  if (p.causal || p.window_left >= 0 || p.window_right >= 0) {
    options.set_diagonal_alignment(p.lower_right ? fe::DiagonalAlignment_t::BOTTOM_RIGHT
                                                 : fe::DiagonalAlignment_t::TOP_LEFT);
    if (p.causal)
      options.set_diagonal_band_right_bound(0);
    else if (p.window_right >= 0)
      options.set_diagonal_band_right_bound(static_cast<int>(p.window_right));
    // The library's left bound counts the diagonal itself.
    if (p.window_left >= 0) options.set_diagonal_band_left_bound(static_cast<int>(p.window_left + 1));
  }
  if (p.dropout_p > 0.0) {
    // Two words of one tensor of the caller's, so the second is aligned to 8 bytes only.
    auto seed = graph.tensor(attributes("seed", slot_seed, single(DType::i64)).set_alignment(8));
    auto offset = graph.tensor(attributes("offset", slot_offset, single(DType::i64)).set_alignment(8));
    options.set_dropout(static_cast<float>(p.dropout_p), seed, offset);
  }
}

void Graph::State::add_forward(const Problem& p) {
  fe::graph::SDPA_attributes options;
  options.set_name("sdpa_forward").set_generate_stats(p.training);
  add_options(options, p, false);
  auto [out, lse] = graph.sdpa(graph.tensor(attributes("query", slot_query, p.query)),
                               graph.tensor(attributes("key", slot_key, p.key)),
                               graph.tensor(attributes("value", slot_value, p.value)), options);
  describe_output(out, "out", slot_out, p.out);
  if (p.training) describe_output(lse, "lse", slot_lse, p.lse);
}

void Graph::State::add_backward(const Problem& p) {
  fe::graph::SDPA_backward_attributes options;
  options.set_name("sdpa_backward").set_deterministic_algorithm(p.deterministic);
  add_options(options, p, true);
  if (p.bias_gradient) {
    auto gradient = graph.tensor(attributes("bias_grad", slot_bias_grad, p.bias_grad));
    gradient->set_output(true).set_is_virtual(false);
    options.set_dbias(gradient);
  }
  auto [query_grad, key_grad, value_grad] = graph.sdpa_backward(
      graph.tensor(attributes("query", slot_query, p.query)), graph.tensor(attributes("key", slot_key, p.key)),
      graph.tensor(attributes("value", slot_value, p.value)), graph.tensor(attributes("out", slot_out, p.out)),
      graph.tensor(attributes("out_grad", slot_out_grad, p.out_grad)),
      graph.tensor(attributes("lse", slot_lse, p.lse)), options);
  describe_output(query_grad, "query_grad", slot_query_grad, p.query_grad);
  describe_output(key_grad, "key_grad", slot_key_grad, p.key_grad);
  describe_output(value_grad, "value_grad", slot_value_grad, p.value_grad);
}

Graph::Graph(const Problem& problem, Direction direction, const Side& side) : state_(std::make_unique<State>()) {
  state_->side = side;
  fe::graph::Graph& graph = state_->graph;
  graph.set_io_data_type(library_dtype(problem.query.dtype))
      .set_intermediate_data_type(fe::DataType_t::FLOAT)
      .set_compute_data_type(fe::DataType_t::FLOAT)
      .set_sm_version(side.compute_capability);
  if (direction == Direction::forward)
    state_->add_forward(problem);
  else
    state_->add_backward(problem);
}

Graph::Graph(std::unique_ptr<State> state) : state_(std::move(state)) {}
Graph::~Graph() = default;

Answer Graph::prove() {
  fe::graph::Graph& graph = state_->graph;
  Answer answer;
  const auto stopped = [&](fe::error_t error, const char* stage) {
    if (error.is_good()) return false;
    answer.message = std::string(stage) + ": " + one_line(error.get_message());
    answer.verdict = verdict_of(error.get_code(), error.get_message());
    return true;
  };
  auto handle = static_cast<cudnnHandle_t>(state_->side.handle);
  if (!handle) {
    auto properties = std::make_shared<fe::DeviceProperties>();
    const std::string& text = state_->side.description;
    if (stopped(properties->deserialize(std::vector<uint8_t>(text.begin(), text.end())), "description")) {
      answer.verdict = Verdict::failed;
      return answer;
    }
    graph.set_device_properties(properties);
  }
  if (stopped(graph.validate(), "validate")) return answer;
  if (stopped(handle ? graph.build_operation_graph(handle) : graph.build_operation_graph(), "operation graph"))
    return answer;
  if (stopped(graph.create_execution_plans({fe::HeurMode_t::A}), "heuristics")) return answer;
  if (stopped(graph.check_support(), "support")) return answer;
  answer.verdict = Verdict::accepted;
  answer.plan_count = graph.get_execution_plan_count();
  answer.plan = plan_name(0);
  if (handle) return answer;
  // Before a plan is built the workspace can be had in one way: a limit below every size is refused with the size.
  graph.deselect_workspace_greater_than(-1);
  const std::string text = graph.check_support().get_message();
  constexpr std::string_view marker = "workspace violation. Requires ";
  if (const size_t at = text.find(marker); at != std::string::npos)
    std::from_chars(text.data() + at + marker.size(), text.data() + text.size(), answer.workspace_bytes);
  return answer;
}

fe::error_t Graph::State::built() {
  auto error = graph.prepare_variant_pack_template();
  if (error.is_good()) uids = graph.get_variant_pack_uids_sorted();
  return error;
}

bool Graph::build(int64_t index, std::string& reason) {
  auto error = state_->graph.build_plan_at_index(index);
  if (error.is_good()) error = state_->built();
  if (error.is_good()) return true;
  reason = one_line(error.get_message());
  return false;
}

int64_t Graph::plan_count() const { return state_->graph.get_execution_plan_count(); }

std::string Graph::plan_name(int64_t index) const {
  std::string name;
  if (state_->graph.get_plan_name_at_index(index, name).is_bad()) return "unnamed";
  return name;
}

size_t Graph::workspace_bytes() const {
  int64_t bytes = 0;
  if (auto error = state_->graph.get_workspace_size(bytes); error.is_bad())
    throw DeviceError("cudnn: the workspace of a built plan: " + one_line(error.get_message()));
  return static_cast<size_t>(bytes);
}

std::vector<uint8_t> Graph::serialize() const {
  std::vector<uint8_t> bytes;
  if (auto error = state_->graph.serialize(bytes, false); error.is_bad()) return {};
  return bytes;
}

std::unique_ptr<Graph> Graph::restore(const std::vector<uint8_t>& bytes, void* handle, std::string& reason) {
  auto state = std::make_unique<State>();
  state->restored = true;
  try {
    auto error = state->graph.deserialize(static_cast<cudnnHandle_t>(handle), bytes, true, false);
    if (error.is_good()) error = state->built();
    if (error.is_good()) return std::unique_ptr<Graph>(new Graph(std::move(state)));
    reason = one_line(error.get_message());
  } catch (const std::exception& error) {  // the JSON reader throws on bytes that are none
    reason = one_line(error.what());
  }
  return nullptr;
}

void Graph::execute(void* handle, void* const (&pointers)[slot_count], void* workspace) const {
  void* ordered[slot_count];
  int count = 0;
  for (int64_t uid : state_->uids) {
    FULMEN_CHECK(uid > 0 && uid < slot_count && pointers[uid] != nullptr);
    ordered[count++] = pointers[uid];
  }
  auto error = state_->graph.execute(static_cast<cudnnHandle_t>(handle), ordered, count, workspace);
  if (error.is_bad())
    throw DeviceError("cudnn: execute gives " + one_line(error.get_message()) + " (frontend code " +
                      std::to_string(static_cast<int>(error.get_code())) + ")");
}

void use_library(void* handle) { cudnn_frontend::cudnn_dlhandle = handle; }

void* make_handle() {
  cudnnHandle_t handle = nullptr;
  const cudnnStatus_t status = fe::detail::create_handle(&handle);
  if (status != CUDNN_STATUS_SUCCESS)
    throw DeviceError("cudnn: cudnnCreate gives status " + std::to_string(static_cast<int>(status)));
  return handle;
}

void set_stream(void* handle, void* stream) {
  const cudnnStatus_t status =
      fe::detail::set_stream(static_cast<cudnnHandle_t>(handle), static_cast<cudaStream_t>(stream));
  if (status != CUDNN_STATUS_SUCCESS)
    throw DeviceError("cudnn: cudnnSetStream gives status " + std::to_string(static_cast<int>(status)));
}

std::string headers_text() {
  return "cudnn " + version_text(CUDNN_VERSION) + " headers, frontend " + std::to_string(CUDNN_FRONTEND_MAJOR_VERSION) +
         "." + std::to_string(CUDNN_FRONTEND_MINOR_VERSION) + "." + std::to_string(CUDNN_FRONTEND_PATCH_VERSION);
}

}  // namespace fulmen::cudnn
