// The executor `cudnn`: scaled dot product attention on CUDA by cuDNN 9, claimed by proof in both directions. This header
// is all that other folders need; it sees no vendor header, and where Fulmen was built without them the same functions
// exist and say why nothing is claimed.
//
// How a call is claimed: rules.h (cheap rules) -> known_faults.h -> graph.h (cuDNN's own answer for the forward and the
// backward graph) -> on a GPU at hand, the built plan (plans.h), which is what runs.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "executors/cudnn/options.h"
#include "executors/cudnn/problem.h"
#include "executors/executor.h"

namespace fulmen::cudnn {

struct CacheInfo {
  int64_t claims = 0;           // questions asked
  int64_t claim_hits = 0;       // answered from the cache
  int64_t proofs = 0;           // graphs that the library was asked about
  int64_t plan_hits = 0;        // plans found built
  int64_t builds_forward = 0;   // plans built
  int64_t builds_backward = 0;
  int64_t loads_from_store = 0;  // plans restored from disk instead
  int64_t store_writes = 0;
  int64_t store_damaged = 0;  // files that were no good and were built anew
  int64_t evictions = 0;
  int64_t plan_failures = 0;  // plans that failed to build or run; the next one was tried
  int64_t plans = 0;          // held now
  int64_t shared = 0;         // claims that run on a plan shared by many lengths
};

// What a claim's Plan::data points to.
struct ClaimedProblem {
  Problem problem;
  std::string headers;  // "cudnn 9.19.0 headers, frontend 1.32.0"
  int library_version = 0;
  std::shared_ptr<const void> device_plans;  // on a GPU at hand
};

// Runs the accepted plan of one call in one direction. Thread-safe.
class SdpaKernel {
 public:
  virtual ~SdpaKernel() = default;
  // Of one run, beyond what the caller allocates for results.
  virtual size_t workspace_bytes() const = 0;

  struct Forward {
    const void *query = nullptr, *key = nullptr, *value = nullptr;
    const void* mask = nullptr;         // as the call has it: bool or additive
    const void* key_lengths = nullptr;  // i32 [batch]
    const void* seed = nullptr;         // i64 [2], on the device
    void* out = nullptr;
    void* lse = nullptr;  // f32 (batch, heads, query_len), if training
  };
  struct Backward {
    Forward forward;                  // out and lse are read
    const void* out_grad = nullptr;
    void *query_grad = nullptr, *key_grad = nullptr, *value_grad = nullptr, *mask_grad = nullptr;  // null: not wanted
  };
  // `scale` is a run-time value. Throws DeviceError.
  virtual void run_forward(const RunContext& context, const Forward& tensors, double scale) const = 0;
  virtual void run_backward(const RunContext& context, const Backward& tensors, double scale) const = 0;
};

// Holds the library, handles, answers and plans. One per program is enough; all functions may be called from any thread.
class Context {
 public:
  explicit Context(Options options);
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  // Empty if calls can be claimed; else the reason. Opens the library on first use.
  std::string unavailable_reason() const;
  // "9.19.0 (/usr/local/cuda/lib64/libcudnn.so.9), cudnn 9.19.0 headers, frontend 1.32.0"
  std::string version() const;
  int library_version() const;  // 91900; 0 if unavailable

  // The claim of one call: for call.training both directions, else the forward alone. `call` need not have passed
  // check_sdpa_call. Throws DeviceError for what is neither a plan nor a refusal. `stream` is the stream that the call
  // will run on, where it is known: a first claim builds plans, which a stream that is being captured doesn't allow, so
  // that is a DeviceError before anything is touched.
  std::shared_ptr<const Claim> claim_sdpa(const SdpaCall& call, const Target& target, const SdpaLayouts& layouts = {},
                                          const void* stream = nullptr) const;

  // What a checker that asks for the forward graph alone would have said. For tests and `explain`; nobody runs it.
  Claim claim_forward_only(const SdpaCall& call, const Target& target) const;

  // The kernel of a claimed call on a GPU at hand.
  std::shared_ptr<const SdpaKernel> kernel(const Plan& plan, const Target& target) const;

  // From now on calls with this key are refused as `revoked`.
  void revoke(const SdpaCall& call, const Target& target, const SdpaLayouts& layouts, const std::string& reason) const;

  CacheInfo cache_info() const;
  void clear_caches() const;  // answers and plans in memory; the store stays

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// For the executor list: ops sdpa, sdpa_forward and sdpa_backward.
std::shared_ptr<const Executor> make_executor(std::shared_ptr<const Context> context);

// Why this build has no cuDNN; empty if it has.
std::string build_reason();

}  // namespace fulmen::cudnn
