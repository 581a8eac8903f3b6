// What a user can set of the cuDNN executor. Environment variables are read here and nowhere else in this folder:
//   FULMEN_CUDNN_LIBRARY   the library, or the folder it is in; goes before every other place
//   FULMEN_CACHE_DIR       where plans are kept on disk (else XDG_CACHE_HOME/fulmen or ~/.cache/fulmen)
//   FULMEN_PLAN_STORE=0    keeps no plans on disk
//   FULMEN_CUDNN_FAULT     for tests: "build", "forward", "backward" or several with commas, each with ":N" for the
//                          first N times (else always) makes that step of a plan fail
//   FULMEN_CUDNN_EXACT_LENGTHS  how many lengths of one kind of call get plans of their own (8); later ones share
//   FULMEN_CUDNN_IGNORE_FAULTS  for probes: ids of known_faults.cpp, with commas, that are taken to be gone
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace fulmen::cudnn {

struct Options {
  std::string library;
  std::vector<std::string> search_folders;  // such as the cudnn folder beside PyTorch; the caller knows where that is
  std::string cache_folder;
  bool plan_store = true;
  size_t plan_limit = 256;    // built plans kept in memory
  size_t claim_limit = 8192;  // answers kept
  size_t exact_lengths = 8;   // lengths of a family of calls with plans of their own; later ones share padded plans
  uint64_t store_limit_bytes = uint64_t{512} << 20;
  int64_t workspace_limit_bytes = int64_t{16} << 30;  // a plan that wants more is refused
  std::string fault;
  std::string ignored_faults;
  std::function<void(const std::string&)> warn;  // absent: to stderr
};

Options options_from_environment();

}  // namespace fulmen::cudnn
