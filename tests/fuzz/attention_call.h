// One random call of attention as a user could make it: any rank, broadcasts, layouts, masks and options of the op `sdpa`.
// It is a line of text and back, so that a failing draw is one line to run again, and knows smaller calls near it, so
// that a failure shrinks. What the call means, in float64 and with a bound on the error of each element:
// attention_exact.cpp. Who draws and runs them: attention_calls_fuzz.cpp.
#pragma once

#include <optional>
#include <random>
#include <string>
#include <vector>

#include "executors/cpu/dispatch.h"
#include "ops/op_def.h"
#include "ops/sdpa_call.h"

namespace fulmen::fuzz {

// Who runs it: the default list; the default list with attention claimed by nobody, so that its decomposition runs; the
// reference executor alone.
enum class Runner { kernels, decomposition, reference };

struct AttentionCall {
  std::vector<std::optional<TensorType>> types{sdpa_operand_count};  // requires_grad: its gradient is asked for
  Attributes attrs;
  Runner runner = Runner::kernels;
  cpu::Isa isa = cpu::Isa::generic;
  int threads = 1;
  int style = 0;        // what values are drawn: see operand_values
  uint64_t values = 0;  // seed of the values

  const TensorType& query() const { return *types[sdpa_query]; }
  const TensorType& key() const { return *types[sdpa_key]; }
  const TensorType& value() const { return *types[sdpa_value]; }
  bool return_lse() const { return attrs.has("return_lse") && attrs.get_bool("return_lse"); }
};

AttentionCall draw_call(uint64_t seed);

std::string to_text(const AttentionCall& call);
AttentionCall parse_call(const std::string& text);

// Calls a step simpler, most promising first. Some of them may be no call at all (a ShapeError says so).
std::vector<AttentionCall> simpler_calls(const AttentionCall& call);

// Values of the operands, rounded to their dtypes; out's gradient and lse's follow them.
struct AttentionValues {
  std::vector<HostTensor> operands{sdpa_operand_count};
  HostTensor out_grad, lse_grad;
};
AttentionValues operand_values(const AttentionCall& call, const TensorType& out, const TensorType* lse);

// A result and how far from it a right implementation may be, element by element, in row-major order.
struct Bounded {
  std::vector<double> value, bound;
};
struct ExactAttention {
  Bounded out, lse;
  std::vector<Bounded> gradients{sdpa_gradient_count};  // in the operands' own shapes; empty where there is none
};

// The definition (ops/sdpa_call.h), in float64. The bounds follow the roundings that the dtype and f32 arithmetic make
// unavoidable, up to a constant: of products, of logits by their size, of probabilities, of terms that cancel.
ExactAttention exact_attention(const AttentionCall& call, const AttentionValues& values);

}  // namespace fulmen::fuzz
