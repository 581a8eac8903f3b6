#include "executors/cpu/dispatch.h"

#include <atomic>
#include <cstdlib>
#include <string>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "core/error.h"

namespace fulmen::cpu {
namespace {

#if defined(__x86_64__)
// The kernel hands out the tile state only to processes that ask for it (arch_prctl, feature 18: tile data).
bool may_use_tiles() {
  constexpr long request_permission = 0x1023;
  constexpr long tile_data = 18;
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
  const bool tile = edx & (1u << 24), bf16 = edx & (1u << 22);
  return tile && bf16 && syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
}

bool has_avx512_bf16() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax & (1u << 5));
}
#endif

std::vector<Isa> find_isas() {
  std::vector<Isa> found;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") &&
                    __builtin_cpu_supports("bmi2");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512cd");
  const bool avx512_bf16 = avx512 && has_avx512_bf16() && __builtin_cpu_supports("avx512vnni");
  if (avx512_bf16 && may_use_tiles()) found.push_back(Isa::amx);
  if (avx512_bf16) found.push_back(Isa::avx512_bf16);
  if (avx512) found.push_back(Isa::avx512);
  if (avx2) found.push_back(Isa::avx2);
#endif
  found.push_back(Isa::generic);
  return found;
}

Isa initial_choice() {
  const auto& isas = available_isas();
  const char* asked = std::getenv("FULMEN_CPU_TARGET");
  if (!asked || !*asked) return isas.front();
  std::string known;
  for (Isa isa : isas) {
    if (isa_name(isa) == asked) return isa;
    known += std::string(known.empty() ? "" : ", ") + std::string(isa_name(isa));
  }
  throw UnsupportedError("cpu: FULMEN_CPU_TARGET is '" + std::string(asked) + "'; this machine can run " + known);
}

std::atomic<Isa>& choice() {
  static std::atomic<Isa> isa{initial_choice()};
  return isa;
}

}  // namespace

std::string_view isa_name(Isa isa) {
  switch (isa) {
    case Isa::generic: return "generic";
    case Isa::avx2: return "avx2";
    case Isa::avx512: return "avx512";
    case Isa::avx512_bf16: return "avx512_bf16";
    case Isa::amx: return "amx";
  }
  return "generic";
}

const std::vector<Isa>& available_isas() {
  static const std::vector<Isa> isas = find_isas();
  return isas;
}

Isa chosen_isa() { return choice().load(std::memory_order_relaxed); }

void force_isa(Isa isa) { choice().store(isa); }

}  // namespace fulmen::cpu
