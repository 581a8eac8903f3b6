// The samples of the op catalogue (conformance/sample_call.h) as parameters of tests.
#pragma once

#include "conformance/sample_call.h"

namespace fulmen::table {

using namespace conformance;

// "rerun: fulmen_tests --gtest_filter='*Name/gelu_plain'"
std::string rerun_line();

}  // namespace fulmen::table
