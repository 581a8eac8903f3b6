// Several threads at once: in the thread pool, in one compiled program, in compile() with one executor list, and in a
// claim that is being revoked. `make sanitize` runs these under the thread sanitizer too.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <functional>
#include <memory>
#include <numeric>
#include <thread>
#include <vector>

#include "core/error.h"
#include "core/parallel.h"
#include "driver/audit.h"
#include "driver/compile.h"
#include "driver/revocation.h"
#include "executors/default_list.h"
#include "ir/parse.h"
#include "ops/rebuild.h"
#include "ops/table.h"

namespace fulmen {
namespace {

constexpr int thread_total = 4;

void on_threads(const std::function<void(int)>& body) {
  std::atomic<int> waiting{thread_total};
  std::vector<std::thread> threads;
  for (int i = 0; i < thread_total; ++i)
    threads.emplace_back([&, i] {
      --waiting;
      while (waiting > 0) std::this_thread::yield();  // all begin together
      body(i);
    });
  for (std::thread& thread : threads) thread.join();
}

ExecutorList cpu_list() {
  ExecutorList list;
  for (const auto& executor : default_executors())
    if (executor->name() == "cpu" || executor->name() == "reference") list.push_back(executor);
  return list;
}

// Attention, a matrix product and a fused chain, with gradients.
Trace example() {
  return rebuild(parse_trace(
      "trace example(x: f32[2,4,33,16]!, weight: f32[16,16]!) {\n"
      "  q: f32[2,4,33,16]! = matmul(x, weight)\n"
      "  out: f32[2,4,33,16]! = sdpa(q, x, x, is_causal=true)\n"
      "  bent: f32[2,4,33,16]! = gelu(out)\n"
      "  loss: f32[]! = sum(bent)\n"
      "  return loss, out\n"
      "}\n",
      [](std::string_view name) { return find_op(name); }));
}

std::shared_ptr<const CompiledTrace> compiled(const ExecutorList& list) {
  CompileOptions options;
  options.executors = list;
  options.training = true;
  return compile(example(), options);
}

using Memory = std::vector<float>;

Memory numbers(int64_t count, unsigned seed) {
  Memory made(static_cast<size_t>(count));
  for (float& value : made) value = static_cast<float>((seed = seed * 1664525u + 1013904223u) >> 20) / 2048.0f - 1.0f;
  return made;
}

std::vector<Memory> run(const Program& program, const std::vector<const void*>& inputs) {
  std::vector<Memory> results;
  std::vector<void*> outputs;
  for (const TensorType& type : program.outputs()) results.emplace_back(static_cast<size_t>(span_elements(type.shape, type.strides)));
  for (Memory& result : results) outputs.push_back(result.data());
  const size_t bytes = (program.arena_bytes() + 63) / 64 * 64;
  const std::unique_ptr<void, void (*)(void*)> arena(bytes ? std::aligned_alloc(64, bytes) : nullptr, std::free);
  program.run({}, inputs.data(), outputs.data(), arena.get());
  return results;
}

// Forward and backward; everything that comes out.
std::vector<Memory> train(const CompiledTrace& made, const Memory& x, const Memory& weight) {
  const void* inputs[] = {x.data(), weight.data()};
  std::vector<Memory> results = run(made.forward, {inputs[0], inputs[1]});
  std::vector<const void*> incoming;
  for (int index : made.backward_saved_inputs) incoming.push_back(inputs[index]);
  for (size_t i = static_cast<size_t>(made.output_count); i < results.size(); ++i) incoming.push_back(results[i].data());
  std::vector<Memory> ones;
  for (int output : made.grad_outputs) ones.emplace_back(made.forward.outputs()[static_cast<size_t>(output)].element_count(), 1.0f);
  for (const Memory& one : ones) incoming.push_back(one.data());
  for (Memory& gradient : run(*made.backward, incoming)) results.push_back(std::move(gradient));
  return results;
}

TEST(Threads, PoolServesRegionsFromAllAndChangingCounts) {
  on_threads([](int own) {
    for (int round = 0; round < 200; ++round) {
      if (own == 0) set_thread_count(1 + round % 3);
      std::vector<int64_t> squares(997);
      parallel_for(static_cast<int64_t>(squares.size()), 10, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) squares[static_cast<size_t>(i)] = i * i;
      });
      ASSERT_EQ(std::accumulate(squares.begin(), squares.end(), int64_t{0}), int64_t{996} * 997 * 1993 / 6);
    }
  });
  set_thread_count(0);
}

TEST(Threads, PoolCarriesAnExceptionToTheThreadThatAsked) {
  set_thread_count(3);
  on_threads([](int own) {
    for (int round = 0; round < 50; ++round) {
      try {
        parallel_for(100, 1, [&](int64_t begin, int64_t) {
          if (begin == 0) throw ShapeError("of " + std::to_string(own));
        });
        FAIL() << "no exception";
      } catch (const ShapeError& error) {
        ASSERT_EQ(error.what(), "of " + std::to_string(own));
      }
    }
  });
  set_thread_count(0);
}

TEST(Threads, OneProgramServesAll) {
  set_thread_count(2);
  const auto made = compiled(cpu_list());
  const Memory weight = numbers(256, 5);
  std::vector<Memory> x;
  std::vector<std::vector<Memory>> alone;
  for (unsigned i = 0; i < thread_total; ++i) {
    x.push_back(numbers(2 * 4 * 33 * 16, i));
    alone.push_back(train(*made, x.back(), weight));
  }
  on_threads([&](int own) {
    for (int round = 0; round < 10; ++round) ASSERT_EQ(train(*made, x[static_cast<size_t>(own)], weight), alone[static_cast<size_t>(own)]);
  });
  set_thread_count(0);
}

TEST(Threads, OneExecutorListServesAllCompilations) {
  const ExecutorList list = cpu_list();
  const Memory x = numbers(2 * 4 * 33 * 16, 1), weight = numbers(256, 2);
  const std::vector<Memory> alone = train(*compiled(list), x, weight);
  on_threads([&](int) { ASSERT_EQ(train(*compiled(list), x, weight), alone); });
}

TEST(Threads, AuditLooksAtEachCallOnce) {
  const bool before = set_audit(true);
  const AuditCounts counts = audit_counts();
  const Memory x = numbers(2 * 4 * 33 * 16, 3), weight = numbers(256, 4);
  const auto made = compiled(cpu_list());
  on_threads([&](int) { train(*made, x, weight); });
  EXPECT_EQ(audit_counts().differing, counts.differing);
  set_audit(before);
}

// Claims what the reference would, and fails on every run.
class Failing : public Executor {
 public:
  explicit Failing(std::shared_ptr<const Executor> real) : real_(std::move(real)) {}
  std::string_view name() const override { return "failing"; }
  std::string_view doc() const override { return "fails"; }
  Claim claim(const Call& call, const Target& target) const override { return real_->claim(call, target); }
  std::unique_ptr<Kernel> make_kernel(const Call&, const Plan&, const Target&) const override { return std::make_unique<Fails>(); }

 private:
  struct Fails : Kernel {
    void run(const RunContext&, const void* const*, void* const*) const override { throw DeviceError("it fails"); }
  };
  std::shared_ptr<const Executor> real_;
};

TEST(Threads, AClaimThatAllSeeFailIsRevokedOnceAndAllResultsAreRight) {
  std::atomic<int> warnings{0};
  set_warning_handler([&](const std::string&) { ++warnings; });
  ExecutorList list = cpu_list();
  const Trace trace = parse_trace("trace t(x: f32[64]) {\n  y: f32[64] = mul(x, x)\n  return y\n}\n", [](std::string_view op) { return find_op(op); });
  const int before = revocation_count();
  list.insert(list.begin(), std::make_shared<Failing>(list.back()));
  CompileOptions options;
  options.executors = list;
  const auto made = compile(trace, options);
  const Memory x = numbers(64, 9);
  Memory squares;
  for (float value : x) squares.push_back(value * value);
  on_threads([&](int) {
    for (int round = 0; round < 10; ++round) ASSERT_EQ(run(made->forward, {x.data()}), std::vector<Memory>{squares});
  });
  set_warning_handler({});
  EXPECT_EQ(revocation_count(), before + 1);
  EXPECT_EQ(warnings, 1);
}

}  // namespace
}  // namespace fulmen
