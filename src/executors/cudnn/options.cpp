#include "executors/cudnn/options.h"

#include <charconv>
#include <cstdlib>
#include <string_view>

namespace fulmen::cudnn {

namespace {

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

}  // namespace

Options options_from_environment() {
  Options options;
  options.library = variable("FULMEN_CUDNN_LIBRARY");
  options.cache_folder = variable("FULMEN_CACHE_DIR");
  if (options.cache_folder.empty()) {
    const std::string cache = variable("XDG_CACHE_HOME"), home = variable("HOME");
    if (!cache.empty())
      options.cache_folder = cache + "/fulmen";
    else if (!home.empty())
      options.cache_folder = home + "/.cache/fulmen";
    else
      options.plan_store = false;
  }
  if (variable("FULMEN_PLAN_STORE") == "0") options.plan_store = false;
  options.fault = variable("FULMEN_CUDNN_FAULT");
  const std::string exact = variable("FULMEN_CUDNN_EXACT_LENGTHS");
  std::from_chars(exact.data(), exact.data() + exact.size(), options.exact_lengths);
  options.ignored_faults = variable("FULMEN_CUDNN_IGNORE_FAULTS");
  return options;
}

}  // namespace fulmen::cudnn
