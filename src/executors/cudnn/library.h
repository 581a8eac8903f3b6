// Opens cuDNN at run time: FULMEN_CUDNN_LIBRARY, else the copy already in the process, else the ones in the caller's
// search folders (beside PyTorch), else the system's. cuDNN can be in a process once, so the first one opened stays.
#pragma once

#include <string>

#include "executors/cudnn/options.h"

namespace fulmen::cudnn {

// Versions as cudnnGetVersion() gives them: 91900 is 9.19.0.
inline constexpr int version_needed = 90800;

struct Library {
  void* handle = nullptr;  // null: not usable
  std::string path;
  std::string found;  // "already in the process", "in a search folder", ...
  int version = 0;
  int cudart_version = 0;  // the CUDA runtime it was built with, 13000 for 13.0
  std::string problem;     // why it isn't usable
};

const Library& open_library(const Options& options);

std::string version_text(int version);  // "9.19.0"

// cuDNN answers nothing without a driver library in the process. Where there is none, this loads a stand-in in which
// every function says "no device": enough for described targets, never used for a device. Returns how it went:
// "driver", "stand-in", or a sentence that begins with "no" if neither could be loaded.
const std::string& ensure_driver_library();

}  // namespace fulmen::cudnn
