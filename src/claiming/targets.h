// Targets by name: this machine's CPU ("cpu"), its GPUs ("cuda", "cuda:1"), the GPUs that Fulmen ships a description of
// ("h200", "a100", ...; claiming/target_data.h) and any JSON file, as cuDNN takes it and as save_target writes it.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "runtime/target.h"

namespace fulmen {

Target cpu_target();

// "cpu", "cuda", "cuda:N", a shipped name (any case), or the path of a JSON file. UnsupportedError for a name that is
// none of them, with the names there are; DeviceError for a GPU that isn't here; TypeError for a file that isn't such a
// description, with the field that is missing.
Target find_target(std::string_view name);

// From the text of a description; `name` is for messages. TypeError as above.
Target parse_target(std::string_view json, std::string name);

// What `fulmen targets` lists: the CPU, the GPUs at hand, the shipped descriptions.
std::vector<Target> known_targets();

// Writes the description of a GPU at hand (or any target that has one) to a file that find_target reads back.
void save_target(const Target& target, const std::string& path);

// "NVIDIA H200", or the target's name where it has no description.
std::string device_name(const Target& target);

}  // namespace fulmen
