#include "claiming/targets.h"

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <fstream>
#include <optional>
#include <sstream>

#include "claiming/target_data.h"
#include "core/error.h"
#include "runtime/cuda/driver.h"

namespace fulmen {

namespace {

// A description is flat JSON with known keys; a reader for two of its fields is all that is needed here. cuDNN itself
// parses the whole and reports what it can't read.
std::optional<std::string_view> field(std::string_view json, std::string_view key) {
  const std::string quoted = "\"" + std::string(key) + "\"";
  size_t at = json.find(quoted);
  if (at == std::string_view::npos) return std::nullopt;
  at = json.find_first_not_of(" \t\r\n", at + quoted.size());
  if (at == std::string_view::npos || json[at] != ':') return std::nullopt;
  at = json.find_first_not_of(" \t\r\n", at + 1);
  if (at == std::string_view::npos) return std::nullopt;
  if (json[at] == '"') {
    const size_t end = json.find('"', at + 1);
    if (end == std::string_view::npos) return std::nullopt;
    return json.substr(at + 1, end - at - 1);
  }
  return json.substr(at, json.find_first_of(",}] \t\r\n", at) - at);
}

std::optional<long long> number(std::string_view json, std::string_view key) {
  const auto text = field(json, key);
  long long value = 0;
  if (!text || std::from_chars(text->data(), text->data() + text->size(), value).ec != std::errc{}) return std::nullopt;
  return value;
}

Target shipped(const ShippedTarget& entry) {
  Target target;
  target.name = entry.name;
  target.kind = DeviceKind::cuda;
  target.described = true;
  target.derived = entry.derived;
  target.compute_capability = entry.compute_capability;
  target.description = entry.json;
  return target;
}

std::string lower(std::string_view text) {
  std::string result(text);
  std::transform(result.begin(), result.end(), result.begin(), [](unsigned char c) { return std::tolower(c); });
  return result;
}

}  // namespace

Target cpu_target() { return {}; }

Target parse_target(std::string_view json, std::string name) {
  if (const size_t first = json.find_first_not_of(" \t\r\n"); first == std::string_view::npos || json[first] != '{')
    throw TypeError("target: " + name + " is no JSON object; `fulmen targets --save` writes a description");
  for (const char* key : {"deviceVer", "multiProcessorCount", "maxSharedMemoryPerBlockOptin", "deviceName"})
    if (!field(json, key)) throw TypeError("target: " + name + " has no field \"" + key + "\"; write one with `fulmen targets --save`");
  const auto version = number(json, "deviceVer");
  if (!version || *version < 100 || *version > 9990)
    throw TypeError("target: " + name + " has deviceVer " + std::string(*field(json, "deviceVer")) +
                    ", needed is the compute capability times 100, such as 900");
  Target target;
  target.name = std::move(name);
  target.kind = DeviceKind::cuda;
  target.described = true;
  target.compute_capability = static_cast<int>(*version / 10);
  target.description = json;
  return target;
}

Target find_target(std::string_view name) {
  const std::string wanted = lower(name);
  if (wanted == "cpu") return cpu_target();
  if (wanted == "cuda") return cuda::Driver::require().target(0);
  if (wanted.starts_with("cuda:")) {
    int index = -1;
    const char *begin = wanted.data() + 5, *end = wanted.data() + wanted.size();
    if (const auto [p, error] = std::from_chars(begin, end, index); error != std::errc{} || p != end || index < 0)
      throw UnsupportedError("target: " + wanted + " is no device; cuda:0 is the first GPU");
    return cuda::Driver::require().target(index);
  }
  for (const ShippedTarget& entry : shipped_targets())
    if (entry.name == wanted) return shipped(entry);
  const std::string path(name);
  if (std::ifstream file(path, std::ios::binary); file) {
    std::ostringstream text;
    text << file.rdbuf();
    const size_t slash = path.find_last_of('/');
    std::string stem = slash == std::string::npos ? path : path.substr(slash + 1);
    if (stem.ends_with(".json")) stem.resize(stem.size() - 5);
    return parse_target(text.str(), stem);
  }
  std::string names = "cpu, cuda, cuda:N";
  for (const ShippedTarget& entry : shipped_targets()) names += ", " + std::string(entry.name);
  throw UnsupportedError("target: there is no target and no file " + path + "; known are " + names);
}

std::vector<Target> known_targets() {
  std::vector<Target> targets{cpu_target()};
  if (const cuda::Driver* driver = cuda::Driver::find())
    for (int i = 0; i < driver->device_count(); ++i) targets.push_back(driver->target(i));
  for (const ShippedTarget& entry : shipped_targets()) targets.push_back(shipped(entry));
  return targets;
}

void save_target(const Target& target, const std::string& path) {
  if (target.description.empty())
    throw UnsupportedError("target: " + target.name + " has no description to save; only GPUs have one");
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file << target.description << '\n';
  file.close();
  if (!file) throw DeviceError("target: cannot write " + path);
}

std::string device_name(const Target& target) {
  const auto name = field(target.description, "deviceName");
  return name ? std::string(*name) : target.name;
}

}  // namespace fulmen
