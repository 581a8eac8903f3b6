// A call on plans that many lengths share (problem.h, shared_problem): its tensors are copied into padded ones, whose
// tails are zeros, and the results back. Costs one pass over each tensor and saves a build for every new length.
#include <algorithm>

#include "core/error.h"
#include "executors/cudnn/device_kernel.h"

namespace fulmen::cudnn {

namespace {

class SharedKernel : public SdpaKernel {
 public:
  SharedKernel(std::shared_ptr<const ClaimedProblem> claimed, std::shared_ptr<const DevicePlans> plans, int device)
      : claimed_(std::move(claimed)), plans_(std::move(plans)), device_(device) {
    Pieces forward(nullptr), backward(nullptr);
    take(forward, false);
    if (plans_->backward) take(backward, true);
    workspace_bytes_ = std::max(forward.used(), backward.used());
    const Problem& p = claimed_->problem;
    query_lengths_ = plans_->converter->constant_lengths(device, p.batch(), p.query_len());
    key_lengths_ = plans_->converter->constant_lengths(device, p.batch(), p.key_len());
  }

  size_t workspace_bytes() const override { return workspace_bytes_; }

  void run_forward(const RunContext& context, const Forward& t, double scale) const override {
    const Problem &p = claimed_->problem, &s = *plans_->shared;
    Pieces pieces(context.workspace);
    Taken taken = take(pieces, false);
    float run_scale = static_cast<float>(scale);
    fill(taken.slots, t, run_scale);
    plans_->converter->copy(device_, context.stream,
                            {{p.query, t.query, s.query, taken.slots[slot_query]},
                             {p.key, t.key, s.key, taken.slots[slot_key]},
                             {p.value, t.value, s.value, taken.slots[slot_value]}});
    plans_->forward->execute(context.stream, taken.slots, taken.library, taken.library_bytes);
    plans_->converter->copy(device_, context.stream,
                            {back(s.out, taken.slots[slot_out], p.out, t.out),
                             back(s.lse, taken.slots[slot_lse], p.lse, p.training ? t.lse : nullptr)});
  }

  void run_backward(const RunContext& context, const Backward& t, double scale) const override {
    const Problem &p = claimed_->problem, &s = *plans_->shared;
    if (!plans_->backward) throw InternalError("cudnn: a backward of a call that was claimed without one");
    Pieces pieces(context.workspace);
    Taken taken = take(pieces, true);
    float run_scale = static_cast<float>(scale);
    fill(taken.slots, t.forward, run_scale);
    plans_->converter->copy(device_, context.stream,
                            {{p.query, t.forward.query, s.query, taken.slots[slot_query]},
                             {p.key, t.forward.key, s.key, taken.slots[slot_key]},
                             {p.value, t.forward.value, s.value, taken.slots[slot_value]},
                             {p.out, t.forward.out, s.out, taken.slots[slot_out]},
                             {p.lse, t.forward.lse, s.lse, taken.slots[slot_lse]},
                             {p.out_grad_in, t.out_grad, s.out_grad, taken.slots[slot_out_grad]}});
    plans_->backward->execute(context.stream, taken.slots, taken.library, taken.library_bytes);
    plans_->converter->copy(device_, context.stream,
                            {back(s.query_grad, taken.slots[slot_query_grad], p.query_grad, t.query_grad),
                             back(s.key_grad, taken.slots[slot_key_grad], p.key_grad, t.key_grad),
                             back(s.value_grad, taken.slots[slot_value_grad], p.value_grad, t.value_grad)});
  }

 private:
  struct Taken {
    void* slots[slot_count] = {};
    void* library = nullptr;
    size_t library_bytes = 0;
  };

  Taken take(Pieces& pieces, bool backward) const {
    const Problem& s = *plans_->shared;
    Taken taken;
    taken.library_bytes = (backward ? plans_->backward : plans_->forward)->workspace_bytes();
    taken.library = pieces.take(taken.library_bytes);
    const auto own = [&](Slot slot, const TensorForm& form) { taken.slots[slot] = pieces.take(form.span_bytes()); };
    own(slot_query, s.query);
    own(slot_key, s.key);
    own(slot_value, s.value);
    own(slot_out, s.out);
    if (s.training) own(slot_lse, s.lse);
    if (!backward) return taken;
    own(slot_out_grad, s.out_grad);
    own(slot_query_grad, s.query_grad);
    own(slot_key_grad, s.key_grad);
    own(slot_value_grad, s.value_grad);
    return taken;
  }

  // What both directions read.
  void fill(void* (&slots)[slot_count], const Forward& t, float& scale) const {
    slots[slot_scale] = &scale;
    slots[slot_query_lengths] = const_cast<void*>(query_lengths_);
    slots[slot_key_lengths] = const_cast<void*>(key_lengths_);
    if (claimed_->problem.dropout_p > 0.0) {
      slots[slot_seed] = const_cast<void*>(t.seed);
      slots[slot_offset] = static_cast<int64_t*>(const_cast<void*>(t.seed)) + 1;
    }
  }

  // The rows that the call has; nothing for a result that nobody wants.
  static Converter::Copy back(TensorForm from, const void* padded, const TensorForm& to, void* data) {
    from.dims = to.dims;
    return {from, padded, to, data};
  }

  std::shared_ptr<const ClaimedProblem> claimed_;
  std::shared_ptr<const DevicePlans> plans_;
  int device_;
  size_t workspace_bytes_ = 0;
  const void *query_lengths_ = nullptr, *key_lengths_ = nullptr;
};

}  // namespace

std::shared_ptr<const SdpaKernel> make_shared_kernel(std::shared_ptr<const ClaimedProblem> claimed,
                                                     std::shared_ptr<const DevicePlans> plans, int device) {
  return std::make_shared<SharedKernel>(std::move(claimed), std::move(plans), device);
}

}  // namespace fulmen::cudnn
