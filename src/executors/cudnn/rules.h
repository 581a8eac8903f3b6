// The cheap rules: what is refused before cuDNN is asked. They keep every call away from the library that can kill the
// process (zero sizes, odd mask strides), that it accepts but isn't to be trusted with, or that Fulmen doesn't pass on.
// They read only the call and the target, so they run anywhere, and each is a row that can be listed and tested.
// What cuDNN itself decides (head dims, masks, gradients by GPU and version) is not repeated here: it is asked
// (graph.h). Known faults of versions are rows of their own (known_faults.h).
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "executors/executor.h"
#include "ops/sdpa_call.h"

namespace fulmen::cudnn {

struct Rule {
  std::string_view name;
  RefusalCode code;
  // The sentence if the call is refused: argument, value found, limit, whose limit.
  std::optional<std::string> (*refuses)(const SdpaCall& call, const Target& target);
};

// In the order they are applied; later rules may rely on earlier ones (ranks, sizes above 0).
std::span<const Rule> rules();

// The first rule that refuses.
std::optional<Refusal> apply_rules(const SdpaCall& call, const Target& target);

}  // namespace fulmen::cudnn
