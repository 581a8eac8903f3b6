#include "executors/cudnn/device_kernel.h"

#include <algorithm>

#include "core/error.h"
#include "runtime/cuda/driver.h"

namespace fulmen::cudnn {

namespace {

// The library loads 16 bytes at a time; a tensor that starts elsewhere is copied for the run. Rare: such a start comes
// from a slice at an odd offset.
class AlignedTensors {
 public:
  AlignedTensors(Converter& converter, int device, void* stream)
      : converter_(converter), device_(device), stream_(stream) {}
  ~AlignedTensors() {
    for (const Copy& copy : copies_) {
      try {
        cuda::Driver::require().release(device_, copy.memory, stream_);
      } catch (const DeviceError&) {
        continue;  // the device has failed already, and that error is on its way
      }
    }
  }
  AlignedTensors(const AlignedTensors&) = delete;
  AlignedTensors& operator=(const AlignedTensors&) = delete;

  void* input(const TensorForm& form, const void* data) {
    if (reinterpret_cast<uintptr_t>(data) % 16 == 0) return const_cast<void*>(data);
    void* memory = add(form, nullptr);
    converter_.copy(device_, stream_, form, data, form, memory);
    return memory;
  }
  // The library writes every gradient; one that the caller doesn't want (null) goes to memory that is dropped.
  void* output(const TensorForm& form, void* data) {
    return data && reinterpret_cast<uintptr_t>(data) % 16 == 0 ? data : add(form, data);
  }
  void write_back() {
    for (const Copy& copy : copies_)
      if (copy.target) converter_.copy(device_, stream_, copy.form, copy.memory, copy.form, copy.target);
  }

 private:
  struct Copy {
    TensorForm form;
    void* memory;
    void* target;
  };
  void* add(const TensorForm& form, void* target) {
    void* memory = cuda::Driver::require().allocate(device_, form.span_bytes(), stream_);
    copies_.push_back({form, memory, target});
    return memory;
  }

  Converter& converter_;
  int device_;
  void* stream_;
  std::vector<Copy> copies_;
};

class DeviceKernel : public SdpaKernel {
 public:
  DeviceKernel(std::shared_ptr<const ClaimedProblem> claimed, std::shared_ptr<const DevicePlans> plans, int device)
      : claimed_(std::move(claimed)), plans_(std::move(plans)), device_(device) {
    const Problem& p = problem();
    if (p.passes_lengths(p.training)) {
      query_lengths_ = plans_->converter->constant_lengths(device, p.batch(), p.query_len());
      if (!p.key_lengths) key_lengths_ = plans_->converter->constant_lengths(device, p.batch(), p.key_len());
    }
    Pieces forward(nullptr), backward(nullptr);
    take_forward(forward);
    workspace_bytes_ = forward.used();
    if (plans_->backward) {
      take_backward(backward);
      workspace_bytes_ = std::max(workspace_bytes_, backward.used());
    }
  }

  size_t workspace_bytes() const override { return workspace_bytes_; }

  void run_forward(const RunContext& context, const Forward& t, double scale) const override;
  void run_backward(const RunContext& context, const Backward& t, double scale) const override;

 private:
  const Problem& problem() const { return claimed_->problem; }
  // Rows may have no open key: their results are set after the library's kernel.
  bool may_close_rows() const { return problem().bias || problem().key_lengths; }

  struct ForwardPieces {
    void* library = nullptr;
    void* bias = nullptr;
    void* open = nullptr;
    size_t library_bytes = 0;
  };
  struct BackwardPieces : ForwardPieces {
    void *lse = nullptr, *out_grad = nullptr, *bias_grad = nullptr;
  };

  void take_shared(Pieces& pieces, ForwardPieces& taken) const {
    const Problem& p = problem();
    // Rows are padded to a multiple of 16 bytes, and so is the last one.
    if (p.converts_mask()) taken.bias = pieces.take(p.bias->span_bytes() + 16);
  }

  ForwardPieces take_forward(Pieces& pieces) const {
    const Problem& p = problem();
    ForwardPieces taken;
    taken.library_bytes = plans_->forward->workspace_bytes();
    taken.library = pieces.take(taken.library_bytes);
    take_shared(pieces, taken);
    if (p.bias) {
      const Sizes stored = stored_form(*p.bias).dims;
      taken.open = pieces.take(static_cast<size_t>(stored[0] * stored[1] * stored[2]));
    }
    return taken;
  }

  BackwardPieces take_backward(Pieces& pieces) const {
    const Problem& p = problem();
    BackwardPieces taken;
    taken.library_bytes = plans_->backward->workspace_bytes();
    taken.library = pieces.take(taken.library_bytes);
    take_shared(pieces, taken);
    if (may_close_rows()) taken.lse = pieces.take(p.lse.span_bytes());
    if (p.copies_out_grad()) taken.out_grad = pieces.take(p.out_grad.span_bytes());
    if (p.bias_gradient && !(p.bias_grad == p.mask_grad))
      taken.bias_grad = pieces.take(p.bias_grad.span_bytes());
    return taken;
  }

  // Slots that both directions fill, and the conversions they need.
  void fill_shared(void* (&slots)[slot_count], const RunContext& context, const Forward& t, const ForwardPieces& pieces,
                   float& scale, float* opened_lse) const {
    const Problem& p = problem();
    Converter& converter = *plans_->converter;
    slots[slot_scale] = &scale;
    if (p.dropout_p > 0.0) {
      slots[slot_seed] = const_cast<void*>(t.seed);
      slots[slot_offset] = static_cast<int64_t*>(const_cast<void*>(t.seed)) + 1;
    }
    if (query_lengths_) slots[slot_query_lengths] = const_cast<void*>(query_lengths_);
    if (query_lengths_) slots[slot_key_lengths] = const_cast<void*>(p.key_lengths ? t.key_lengths : key_lengths_);
    const auto* lse = static_cast<const float*>(t.lse);
    if (!p.bias || !(p.converts_mask() || pieces.open)) {
      if (opened_lse) converter.open_lse(device_, context.stream, lse, opened_lse, p.lse.element_count());
    } else {
      converter.read_mask(device_, context.stream, *p.mask_in, t.mask, stored_form(*p.bias), pieces.bias,
                          static_cast<uint8_t*>(pieces.open), lse, opened_lse, opened_lse ? p.lse.element_count() : 0);
    }
    if (p.bias) slots[slot_bias] = p.converts_mask() ? pieces.bias : const_cast<void*>(t.mask);
  }

  std::shared_ptr<const ClaimedProblem> claimed_;
  std::shared_ptr<const DevicePlans> plans_;
  int device_;
  size_t workspace_bytes_ = 0;
  const void *query_lengths_ = nullptr, *key_lengths_ = nullptr;  // constant, where a direction passes lengths
};

void DeviceKernel::run_forward(const RunContext& context, const Forward& t, double scale) const {
  const Problem& p = problem();
  Pieces pieces(context.workspace);
  const ForwardPieces taken = take_forward(pieces);
  AlignedTensors aligned(*plans_->converter, device_, context.stream);
  void* slots[slot_count] = {};
  float run_scale = static_cast<float>(scale);
  fill_shared(slots, context, t, taken, run_scale, nullptr);
  slots[slot_query] = aligned.input(p.query, t.query);
  slots[slot_key] = aligned.input(p.key, t.key);
  slots[slot_value] = aligned.input(p.value, t.value);
  if (p.bias && !p.converts_mask()) slots[slot_bias] = aligned.input(stored_form(*p.bias), t.mask);
  slots[slot_out] = aligned.output(p.out, t.out);
  slots[slot_lse] = t.lse;
  plans_->forward->execute(context.stream, slots, taken.library, taken.library_bytes);
  if (may_close_rows())
    plans_->converter->close_rows(device_, context.stream, p.bias ? stored_form(*p.bias) : p.out,
                                  static_cast<const uint8_t*>(taken.open),
                                  p.key_lengths ? static_cast<const int32_t*>(t.key_lengths) : nullptr, p.out,
                                  slots[slot_out], p.training ? static_cast<float*>(t.lse) : nullptr);
  aligned.write_back();
}

void DeviceKernel::run_backward(const RunContext& context, const Backward& t, double scale) const {
  const Problem& p = problem();
  if (!plans_->backward) throw InternalError("cudnn: a backward of a call that was claimed without one");
  Converter& converter = *plans_->converter;
  Pieces pieces(context.workspace);
  const BackwardPieces taken = take_backward(pieces);
  AlignedTensors aligned(converter, device_, context.stream);
  void* slots[slot_count] = {};
  float run_scale = static_cast<float>(scale);
  fill_shared(slots, context, t.forward, taken, run_scale, static_cast<float*>(taken.lse));
  slots[slot_query] = aligned.input(p.query, t.forward.query);
  slots[slot_key] = aligned.input(p.key, t.forward.key);
  slots[slot_value] = aligned.input(p.value, t.forward.value);
  if (p.bias && !p.converts_mask()) slots[slot_bias] = aligned.input(stored_form(*p.bias), t.forward.mask);
  slots[slot_out] = aligned.input(p.out, t.forward.out);
  slots[slot_lse] = taken.lse ? taken.lse : t.forward.lse;
  if (taken.out_grad) {
    converter.copy(device_, context.stream, p.out_grad_in, t.out_grad, p.out_grad, taken.out_grad);
    slots[slot_out_grad] = taken.out_grad;
  } else {
    slots[slot_out_grad] = aligned.input(p.out_grad, t.out_grad);
  }
  slots[slot_query_grad] = aligned.output(p.query_grad, t.query_grad);
  slots[slot_key_grad] = aligned.output(p.key_grad, t.key_grad);
  slots[slot_value_grad] = aligned.output(p.value_grad, t.value_grad);
  if (p.key_lengths) {
    // Keys beyond a length get no gradient; whether the library writes those rows isn't promised.
    converter.fill_zero(device_, context.stream, p.query_grad, slots[slot_query_grad]);
    converter.fill_zero(device_, context.stream, p.key_grad, slots[slot_key_grad]);
    converter.fill_zero(device_, context.stream, p.value_grad, slots[slot_value_grad]);
  }
  if (p.bias_gradient)
    slots[slot_bias_grad] = taken.bias_grad ? taken.bias_grad : aligned.output(p.bias_grad, t.mask_grad);
  plans_->backward->execute(context.stream, slots, taken.library, taken.library_bytes);
  if (p.bias_gradient && taken.bias_grad && t.mask_grad) {
    if (p.sums_bias_grad())
      converter.sum(device_, context.stream, p.bias_grad, taken.bias_grad, p.mask_grad, t.mask_grad);
    else
      converter.copy(device_, context.stream, p.bias_grad, taken.bias_grad, p.mask_grad, t.mask_grad);
  }
  aligned.write_back();
}

}  // namespace

std::shared_ptr<const SdpaKernel> make_device_kernel(std::shared_ptr<const ClaimedProblem> claimed,
                                                     std::shared_ptr<const DevicePlans> plans, int device) {
  if (plans->shared) return make_shared_kernel(std::move(claimed), std::move(plans), device);
  return std::make_shared<DeviceKernel>(std::move(claimed), std::move(plans), device);
}

}  // namespace fulmen::cudnn
