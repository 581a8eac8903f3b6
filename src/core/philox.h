// Philox4x32-10, the counter-based generator of every random op on the CPU, and the one mapping from elements to its
// counters. A word depends on the seed and the element's place alone, so neither threads nor tiles change a result,
// and a backward pass draws again what the forward pass drew. Philox: Salmon, Moraes, Dror, Shaw, "Parallel random
// numbers: as easy as 1, 2, 3", 2011.
//
// Mapping. A seed tensor is i64 [2]: seed[0] is the 64-bit key, seed[1] the 64-bit counter offset. Element n of row
// `row` takes word (n mod 64) / 16 of the block whose 128-bit counter is
//   low 64 bits:  offset + 16 * floor(n / 64) + n mod 16      (wraps at 2^64)
//   high 64 bits: row
// so 16 blocks fill 64 neighbouring elements and vectors of 4, 8 or 16 lanes need no shuffles.
// - Ops over a flat tensor (rand, dropout): n is the element's index in row-major order, row is 0.
// - Attention dropout: element (batch, head, i, j) has n = j and row = ((batch * heads + head) << 32) | i.
// Whoever hands out offsets advances them by philox_draws(n's upper bound) a call, and streams never overlap.
#pragma once

#include <cstdint>

namespace fulmen {

struct PhiloxBlock {
  uint32_t word[4];
};

inline constexpr uint32_t philox_multiplier[2] = {0xD2511F53u, 0xCD9E8D57u};
inline constexpr uint32_t philox_weyl[2] = {0x9E3779B9u, 0xBB67AE85u};
inline constexpr int philox_rounds = 10;

constexpr PhiloxBlock philox4x32(uint64_t key, uint64_t counter_low, uint64_t counter_high) {
  uint32_t c0 = static_cast<uint32_t>(counter_low), c1 = static_cast<uint32_t>(counter_low >> 32);
  uint32_t c2 = static_cast<uint32_t>(counter_high), c3 = static_cast<uint32_t>(counter_high >> 32);
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < philox_rounds; ++round) {
    const uint64_t first = uint64_t{philox_multiplier[0]} * c0, second = uint64_t{philox_multiplier[1]} * c2;
    const uint32_t n0 = static_cast<uint32_t>(second >> 32) ^ c1 ^ k0, n2 = static_cast<uint32_t>(first >> 32) ^ c3 ^ k1;
    c1 = static_cast<uint32_t>(second);
    c3 = static_cast<uint32_t>(first);
    c0 = n0;
    c2 = n2;
    k0 += philox_weyl[0];
    k1 += philox_weyl[1];
  }
  return {{c0, c1, c2, c3}};
}

// The word of element n of a row, by the mapping above.
constexpr uint32_t philox_word(uint64_t key, uint64_t offset, uint64_t row, uint64_t n) {
  return philox4x32(key, offset + 16 * (n / 64) + n % 16, row).word[n % 64 / 16];
}

// Counters that elements 0..count-1 of a row use up.
constexpr uint64_t philox_draws(uint64_t count) { return 16 * ((count + 63) / 64); }

constexpr uint64_t attention_dropout_row(int64_t batch_head, int64_t query) {
  return (static_cast<uint64_t>(batch_head) << 32) | static_cast<uint32_t>(query);
}

// Uniform in [0, 1), a multiple of 2^-24.
constexpr float uniform_of_word(uint32_t word) { return static_cast<float>(word >> 8) * 5.9604644775390625e-8f; }

// An element is kept if its word is at least this: probability 0 keeps all, 1 keeps none.
constexpr uint64_t dropout_threshold(double probability) {
  return probability <= 0 ? 0 : probability >= 1 ? uint64_t{1} << 32 : static_cast<uint64_t>(probability * 4294967296.0);
}
constexpr bool dropout_keeps(uint32_t word, uint64_t threshold) { return word >= threshold; }

}  // namespace fulmen
