#include "tests/table/sample_call.h"

#include <gtest/gtest.h>

namespace fulmen::table {

std::string rerun_line() {
  const auto* info = ::testing::UnitTest::GetInstance()->current_test_info();
  return std::string("rerun: fulmen_tests --gtest_filter='") + info->test_suite_name() + "." + info->name() + "'";
}

}  // namespace fulmen::table
