// Which instruction sets this machine can run. FULMEN_CPU_TARGET forces one (tests use it); a name that this machine
// cannot run is an error that lists those it can.
#pragma once

#include <string_view>
#include <vector>

namespace fulmen::cpu {

enum class Isa { generic, avx2, avx512, avx512_bf16, amx };

std::string_view isa_name(Isa isa);

// Best first; generic is always last.
const std::vector<Isa>& available_isas();

// The best one, or what FULMEN_CPU_TARGET asks for.
Isa chosen_isa();

// Tests only: replaces the choice for kernels that are looked up afterwards.
void force_isa(Isa isa);

}  // namespace fulmen::cpu
