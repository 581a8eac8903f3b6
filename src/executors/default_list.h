// The default executor list, in the order in which executors are asked: special hardware and libraries first, the
// executor that takes everything last.
#pragma once

#include "executors/executor.h"

namespace fulmen {

// library_folders: where vendor libraries may lie beside the usual places, such as the folders beside PyTorch. Each call
// makes a list of its own, with caches of its own; a program wants one.
ExecutorList default_executors(const std::vector<std::string>& library_folders = {});

}  // namespace fulmen
