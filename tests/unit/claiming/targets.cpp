#include "claiming/targets.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <fstream>

#include "core/error.h"

namespace fulmen {
namespace {

TEST(Targets, ShippedOnesAreMarked) {
  EXPECT_FALSE(find_target("h200").derived);
  EXPECT_EQ(find_target("H200").compute_capability, 90);
  EXPECT_EQ(device_name(find_target("h200")), "NVIDIA H200");
  for (const char* name : {"h100", "a100", "l40s", "b200", "t4"}) {
    const Target target = find_target(name);
    EXPECT_TRUE(target.described && target.derived) << name;
    EXPECT_EQ(parse_target(target.description, name).compute_capability, target.compute_capability) << name;
  }
  EXPECT_EQ(find_target("cpu").kind, DeviceKind::cpu);
}

TEST(Targets, AFileReadsBack) {
  const std::string path = ::testing::TempDir() + "my_gpu.json";
  save_target(find_target("h200"), path);
  const Target target = find_target(path);
  EXPECT_EQ(target.name, "my_gpu");
  EXPECT_TRUE(target.described);
  EXPECT_EQ(target.compute_capability, 90);
  std::remove(path.c_str());
}

TEST(Targets, FaultsAreNamed) {
  EXPECT_THROW(find_target("h300"), UnsupportedError);
  try {
    find_target("h300");
  } catch (const UnsupportedError& error) {
    EXPECT_NE(std::string(error.what()).find("known are cpu, cuda, cuda:N, h200"), std::string::npos) << error.what();
  }
  EXPECT_THROW(find_target("cuda:x"), Error);
  EXPECT_THROW(parse_target("{}", "empty"), TypeError);
  EXPECT_THROW(parse_target(R"({"deviceVer":9,"multiProcessorCount":1,"maxSharedMemoryPerBlockOptin":1,"deviceName":"x"})", "low"),
               TypeError);
  EXPECT_THROW(save_target(cpu_target(), "/tmp/cpu.json"), UnsupportedError);
  EXPECT_THROW(save_target(find_target("h200"), "/nowhere/at/all.json"), DeviceError);
}

}  // namespace
}  // namespace fulmen
