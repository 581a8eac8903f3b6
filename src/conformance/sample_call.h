// A sample of the op catalogue as something that runs: a trace of one node, and values for its operands. Values depend
// on the op's and the sample's names alone, so a failure repeats.
#pragma once

#include <string>
#include <vector>

#include "ops/builder.h"
#include "ops/op_def.h"
#include "ops/table.h"

namespace fulmen::conformance {

struct SampleCall {
  const OpDef* op = nullptr;
  const Sample* sample = nullptr;
  std::string id;  // "gelu_tanh_form"
};
void PrintTo(const SampleCall& call, std::ostream* out);  // how a test shows it

// Every good sample of every op, in the order of the table; names are unique.
const std::vector<SampleCall>& all_sample_calls();

enum class Marks { as_written, none, every_float };

// The sample's node in a trace whose inputs are the given operands and whose outputs are the wanted results. For an op that
// isn't in the table (a changed copy) too.
Trace trace_of(const OpDef& op, const Sample& sample, Marks marks = Marks::as_written);

// The gradient marks a gradient test uses: those written in the sample, or every float operand if there are none.
Marks gradient_marks(const Sample& sample);

// as_stored: elements that share memory (stride 0) are equal, floats are exact in their dtype. generic: as if the layout
// were contiguous and floats were float64, so that no two elements are equal and none is an integer.
enum class Values { as_stored, generic };

// A value for each given operand, by the sample's domain.
std::vector<HostTensor> values_of(const OpDef& op, const Sample& sample, const Trace& trace, Values kind = Values::as_stored);

// Numbers of the standard normal distribution for a type, from a seed.
HostTensor normal_values(const TensorType& type, uint64_t seed);

}  // namespace fulmen::conformance
