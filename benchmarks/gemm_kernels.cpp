// Speed of GemmPlan alone, on the products of a GPT training step: one line a shape, best and median of half a second.
// Built with -DFULMEN_BUILD_BENCHMARKS=ON.
//   gemm_kernels [threads]
#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "core/half.h"
#include "core/parallel.h"
#include "executors/cpu/dispatch.h"
#include "executors/cpu/gemm/gemm.h"

using namespace fulmen;
using namespace fulmen::cpu;

namespace {

struct Shape {
  int64_t m, n, k;
  bool a_transposed, b_transposed;
};

double seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

void measure(const Shape& s, DType dtype) {
  GemmProblem p;
  p.m = s.m, p.n = s.n, p.k = s.k;
  p.a = {dtype, s.a_transposed ? 1 : s.k, s.a_transposed ? s.m : 1, {}};
  p.b = {dtype, s.b_transposed ? 1 : s.n, s.b_transposed ? s.k : 1, {}};
  p.c = {dtype, s.n, 1, {}};
  p.compute = dtype;
  const GemmPlan plan(p);
  // 0.5 in either dtype, near enough: speed doesn't depend on values.
  std::vector<uint32_t> a(static_cast<size_t>(s.m * s.k), 0x3f003f00u), b(static_cast<size_t>(s.k * s.n), 0x3f003f00u), c(static_cast<size_t>(s.m * s.n));
  void* const workspace = std::aligned_alloc(64, (plan.workspace_bytes() + 127) / 64 * 64);
  std::vector<double> times;
  plan.run(a.data(), b.data(), c.data(), nullptr, nullptr, workspace);
  for (const double end = seconds() + 0.5; seconds() < end || times.size() < 5;) {
    const double begin = seconds();
    plan.run(a.data(), b.data(), c.data(), nullptr, nullptr, workspace);
    times.push_back(seconds() - begin);
  }
  std::free(workspace);
  std::sort(times.begin(), times.end());
  const double work = 2e-9 * static_cast<double>(s.m) * static_cast<double>(s.n) * static_cast<double>(s.k);
  std::printf("%-4s %5lld %5lld %5lld %s%s  best %7.0f  median %7.0f GFLOP/s\n", std::string(dtype_name(dtype)).c_str(), static_cast<long long>(s.m),
              static_cast<long long>(s.n), static_cast<long long>(s.k), s.a_transposed ? "t" : "n", s.b_transposed ? "t" : "n", work / times.front(),
              work / times[times.size() / 2]);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1) set_thread_count(std::atoi(argv[1]));
  std::printf("%s, %d threads\n", std::string(isa_name(chosen_isa())).c_str(), thread_count());
  const Shape shapes[] = {{1024, 1152, 384, false, true}, {1024, 1536, 384, false, true}, {1024, 384, 1536, false, true}, {1024, 384, 1536, false, false},
                          {384, 1536, 1024, true, false}, {1024, 512, 128, false, true},  {1024, 128, 512, false, true},  {128, 512, 1024, true, false},
                          {384, 128, 1024, true, false},  {1024, 768, 50257, false, false}, {50257, 768, 1024, true, false},
                          {1, 4096, 4096, false, true},   {8, 768, 768, false, true}};
  for (DType dtype : {DType::f32, DType::bf16})
    for (const Shape& shape : shapes) measure(shape, dtype);
}
