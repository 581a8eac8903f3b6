// Reads tests/golden/cudnn_cases.txt: attention calls as lines of text.
#pragma once

#include <string>
#include <vector>

#include "executors/cudnn/problem.h"

namespace fulmen::cudnn {

struct Case {
  std::string id;
  SdpaCall call;
  SdpaLayouts layouts;
};

Case parse_case(const std::string& line);
std::vector<Case> read_cases(const std::string& path);

}  // namespace fulmen::cudnn
