// Plans on disk, without a GPU: the bytes are made up, the files and their faults are real.
#include "executors/cudnn/plan_store.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <thread>

#include "core/error.h"
#include "executors/cudnn/converter.h"
#include "executors/cudnn/cudnn.h"

namespace fulmen::cudnn {
namespace {

namespace fs = std::filesystem;

class CudnnPlanStore : public ::testing::Test {
 protected:
  CudnnPlanStore() {
    char name[] = "/tmp/fulmen_plan_store_XXXXXX";
    folder = std::string(mkdtemp(name)) + "/plans";
  }
  ~CudnnPlanStore() override { fs::remove_all(fs::path(folder).parent_path()); }

  PlanStore store(uint64_t limit = 1 << 20) {
    return PlanStore(folder, limit, [this](const std::string& message) { warnings.push_back(message); });
  }
  static StoredPlan plan(size_t size, uint8_t value = 7) { return {3, "eng2_k24=7", std::vector<uint8_t>(size, value)}; }
  uint64_t bytes_held() const {
    uint64_t total = 0;
    for (const auto& file : fs::directory_iterator(folder)) total += file.file_size();
    return total;
  }

  std::string folder;
  std::vector<std::string> warnings;
};

TEST_F(CudnnPlanStore, GivesBackWhatItGot) {
  store().save("a key", plan(1000));
  const auto found = store().load("a key");
  ASSERT_TRUE(found);
  EXPECT_EQ(found->index, 3);
  EXPECT_EQ(found->name, "eng2_k24=7");
  EXPECT_EQ(found->bytes, plan(1000).bytes);
  EXPECT_FALSE(store().load("another key"));
  EXPECT_TRUE(warnings.empty());
}

TEST_F(CudnnPlanStore, EveryDamageIsFoundAndSaidOnce) {
  PlanStore s = store();
  s.save("a key", plan(300));
  const std::string path = s.path_of("a key");
  std::string good;
  {
    std::ifstream file(path, std::ios::binary);
    good.assign(std::istreambuf_iterator<char>(file), {});
  }
  const auto put = [&](const std::string& bytes) { std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes; };
  int64_t damaged = 0;
  for (size_t at = 0; at < good.size(); at += 13) {
    std::string bad = good;
    bad[at] = static_cast<char>(bad[at] ^ 0x40);
    put(bad);
    EXPECT_FALSE(s.load("a key")) << "byte " << at;
    EXPECT_EQ(s.damaged(), ++damaged) << "byte " << at;
    EXPECT_FALSE(fs::exists(path)) << "a damaged file is removed";
  }
  for (size_t size : {size_t{0}, size_t{5}, size_t{16}, good.size() / 2, good.size() - 1}) {
    put(good.substr(0, size));
    EXPECT_FALSE(s.load("a key")) << "cut to " << size;
  }
  put("not a plan at all, but long enough to be one");
  EXPECT_FALSE(s.load("a key"));
  EXPECT_EQ(warnings.size(), 1u);
  put(good);
  EXPECT_TRUE(s.load("a key"));
}

TEST_F(CudnnPlanStore, IsBoundedAndDropsTheLeastUsed) {
  PlanStore s = store(10'000);
  s.save("first", plan(3000));
  s.save("second", plan(3000));
  // Times of files are coarse: say outright which one was used last.
  fs::last_write_time(s.path_of("first"), fs::file_time_type::clock::now() - std::chrono::hours(1));
  fs::last_write_time(s.path_of("second"), fs::file_time_type::clock::now() - std::chrono::hours(2));
  s.save("third", plan(5000));
  EXPECT_TRUE(s.load("first"));
  EXPECT_FALSE(s.load("second"));
  EXPECT_TRUE(s.load("third"));
  EXPECT_LE(bytes_held(), 10'000u);
}

TEST_F(CudnnPlanStore, TwoWritersLoseNothing) {
  std::vector<std::thread> writers;
  for (int t = 0; t < 4; ++t)
    writers.emplace_back([&, t] {
      PlanStore s(folder, 1 << 24, {});
      for (int i = 0; i < 50; ++i) {
        s.save("shared " + std::to_string(i), plan(2000, static_cast<uint8_t>(i)));
        s.save("own " + std::to_string(t) + " " + std::to_string(i), plan(100));
        const auto found = s.load("shared " + std::to_string(i));
        EXPECT_TRUE(found && found->bytes == plan(2000, static_cast<uint8_t>(i)).bytes);
      }
      EXPECT_EQ(s.damaged(), 0);
    });
  for (std::thread& writer : writers) writer.join();
  PlanStore s = store();
  for (int t = 0; t < 4; ++t)
    for (int i = 0; i < 50; ++i) EXPECT_TRUE(s.load("own " + std::to_string(t) + " " + std::to_string(i)));
  for (const auto& file : fs::directory_iterator(folder)) EXPECT_EQ(file.path().extension(), ".plan") << "left over";
}

TEST_F(CudnnPlanStore, AFolderThatCannotBeWrittenIsSaidOnceAndNothingFails) {
  PlanStore s("/proc/fulmen/plans", 1 << 20, [this](const std::string& message) { warnings.push_back(message); });
  s.save("a", plan(10));
  s.save("b", plan(10));
  EXPECT_FALSE(s.load("a"));
  EXPECT_EQ(warnings.size(), 1u);
  PlanStore off("", 1 << 20, {});
  off.save("a", plan(10));
  EXPECT_FALSE(off.load("a"));
}

TEST(CudnnConverter, ItsKernelsCompile) {
  if (!build_reason().empty()) GTEST_SKIP() << build_reason();
  try {
    for (int capability : {80, 90, 100}) EXPECT_GT(compile_cuda(converter_source(), capability, "").size(), 1000u);
    // An architecture that this NVRTC doesn't know gets PTX of the newest it knows below.
    EXPECT_NE(compile_cuda(converter_source(), 91, "").find(".target sm_90"), std::string::npos);
    EXPECT_THROW(compile_cuda("this is no program", 90, ""), DeviceError);
    EXPECT_THROW(compile_cuda(converter_source(), 10, ""), DeviceError);
  } catch (const DeviceError& error) {
    if (std::string(error.what()).find("NVRTC (libnvrtc") != std::string::npos) GTEST_SKIP() << error.what();
    throw;
  }
}

}  // namespace
}  // namespace fulmen::cudnn
