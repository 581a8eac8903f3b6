#include "executors/cudnn/plan_store.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <thread>

namespace fulmen::cudnn {

namespace {

namespace fs = std::filesystem;

constexpr char magic[8] = {'F', 'U', 'L', 'P', 'L', 'A', 'N', '1'};

uint64_t fnv(const char* data, size_t size, uint64_t seed = 0xcbf29ce484222325ull) {
  for (size_t i = 0; i < size; ++i) seed = (seed ^ static_cast<unsigned char>(data[i])) * 0x100000001b3ull;
  return seed;
}

void put(std::string& out, uint64_t value) { out.append(reinterpret_cast<const char*>(&value), sizeof value); }

void put(std::string& out, const std::string& text) {
  put(out, text.size());
  out += text;
}

// Reads what put wrote; false once anything doesn't fit.
struct Reader {
  const std::string& data;
  size_t at;
  bool good = true;

  uint64_t number() {
    uint64_t value = 0;
    if (!good || data.size() - at < sizeof value) return good = false, 0;
    std::memcpy(&value, data.data() + at, sizeof value);
    at += sizeof value;
    return value;
  }
  std::string text() {
    const uint64_t size = number();
    if (!good || data.size() - at < size) return good = false, std::string();
    at += size;
    return data.substr(at - size, size);
  }
};

}  // namespace

PlanStore::PlanStore(std::string folder, uint64_t limit_bytes, std::function<void(const std::string&)> warn)
    : folder_(std::move(folder)), limit_bytes_(limit_bytes), warn_(std::move(warn)) {}

std::string PlanStore::path_of(const std::string& key) const {
  char name[40];
  std::snprintf(name, sizeof name, "%016llx%016llx.plan", static_cast<unsigned long long>(fnv(key.data(), key.size())),
                static_cast<unsigned long long>(fnv(key.data(), key.size(), 0x9ae16a3b2f90404full)));
  return folder_ + "/" + name;
}

void PlanStore::warn_once(bool& said, const std::string& message) {
  {
    std::lock_guard lock(mutex_);
    if (said) return;
    said = true;
  }
  if (warn_) warn_(message);
}

void PlanStore::discard(const std::string& key, const std::string& why) {
  if (folder_.empty()) return;
  ++damaged_;
  const std::string path = path_of(key);
  std::error_code ignored;
  fs::remove(path, ignored);
  warn_once(said_damaged_, "cudnn plan store: " + path + " " + why + "; it was removed and its plan is built anew");
}

std::optional<StoredPlan> PlanStore::load(const std::string& key) {
  if (folder_.empty()) return std::nullopt;
  const std::string path = path_of(key);
  std::ifstream file(path, std::ios::binary);
  if (!file) return std::nullopt;
  std::string data((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  const auto damaged = [&](const char* why) {
    discard(key, why);
    return std::nullopt;
  };
  if (data.size() < sizeof magic + sizeof(uint64_t) || std::memcmp(data.data(), magic, sizeof magic) != 0)
    return damaged("is no plan file");
  uint64_t sum = 0;
  std::memcpy(&sum, data.data() + data.size() - sizeof sum, sizeof sum);
  data.resize(data.size() - sizeof sum);
  if (sum != fnv(data.data(), data.size())) return damaged("is damaged (its checksum differs)");
  Reader reader{data, sizeof magic};
  const std::string held_key = reader.text();
  StoredPlan plan;
  plan.index = static_cast<int64_t>(reader.number());
  plan.name = reader.text();
  const std::string bytes = reader.text();
  if (!reader.good || reader.at != data.size()) return damaged("is damaged (its parts don't fit)");
  if (held_key != key) return std::nullopt;  // another key of the same name: rare, and no fault
  plan.bytes.assign(bytes.begin(), bytes.end());
  utimensat(AT_FDCWD, path.c_str(), nullptr, 0);  // used now
  return plan;
}

void PlanStore::save(const std::string& key, const StoredPlan& plan) {
  if (folder_.empty()) return;
  std::string data(magic, sizeof magic);
  put(data, key);
  put(data, static_cast<uint64_t>(plan.index));
  put(data, plan.name);
  put(data, std::string(plan.bytes.begin(), plan.bytes.end()));
  put(data, fnv(data.data(), data.size()));
  std::error_code error;
  fs::create_directories(folder_, error);
  chmod(folder_.c_str(), 0700);
  const std::string path = path_of(key);
  const std::string beside = path + "." + std::to_string(getpid()) + "." +
                             std::to_string(std::hash<std::thread::id>{}(std::this_thread::get_id()));
  std::ofstream file(beside, std::ios::binary | std::ios::trunc);
  file.write(data.data(), static_cast<std::streamsize>(data.size()));
  file.close();
  if (!file || std::rename(beside.c_str(), path.c_str()) != 0) {
    fs::remove(beside, error);
    return warn_once(said_write_, "cudnn plan store: cannot write " + path + "; plans are built anew in each process");
  }
  ++writes_;
  trim();
}

void PlanStore::trim() {
  std::lock_guard lock(mutex_);
  struct Held {
    fs::file_time_type used;
    uint64_t bytes;
    fs::path path;
  };
  std::vector<Held> held;
  uint64_t total = 0;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder_, error)) {
    if (entry.path().extension() != ".plan") continue;
    std::error_code gone;  // another process may remove it meanwhile
    const Held file{entry.last_write_time(gone), entry.file_size(gone), entry.path()};
    if (gone) continue;
    total += file.bytes;
    held.push_back(file);
  }
  if (total <= limit_bytes_) return;
  std::sort(held.begin(), held.end(), [](const Held& a, const Held& b) { return a.used < b.used; });
  for (const Held& file : held) {
    if (total <= limit_bytes_) break;
    fs::remove(file.path, error);
    total -= file.bytes;
  }
}

}  // namespace fulmen::cudnn
