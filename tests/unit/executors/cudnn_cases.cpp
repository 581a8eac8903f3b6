#include "tests/unit/executors/cudnn_cases.h"

#include <cmath>
#include <fstream>
#include <sstream>
#include <stdexcept>

namespace fulmen::cudnn {

namespace {

TensorType tensor(const std::string& spec) {
  TensorType type = parse_tensor_spec(spec);
  type.device = {DeviceKind::cuda, 0};
  return type;
}

Dims numbers(const std::string& text, char separator) {
  Dims dims;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, separator);) dims.push_back(std::stoll(part));
  return dims;
}

}  // namespace

Case parse_case(const std::string& line) {
  std::istringstream stream(line);
  Case c;
  stream >> c.id;
  std::string key, value;
  bool scale_given = false;
  for (std::string word; stream >> word;) {
    const size_t equals = word.find('=');
    const std::string name = word.substr(0, equals), text = equals == std::string::npos ? "" : word.substr(equals + 1);
    if (name == "q") c.call.query = tensor(text);
    else if (name == "k") key = text;
    else if (name == "v") value = text;
    else if (name == "mask") c.call.mask = tensor(text);
    else if (name == "causal") c.call.is_causal = true;
    else if (name == "lower_right") c.call.lower_right = true;
    else if (name == "training") c.call.training = true;
    else if (name == "deterministic") c.call.deterministic = true;
    else if (name == "dropout") c.call.dropout_p = std::stod(text);
    else if (name == "scale") c.call.scale = std::stod(text), scale_given = true;
    else if (name == "window") {
      const Dims sides = numbers(text, ':');
      c.call.window_left = sides.at(0), c.call.window_right = sides.at(1);
    } else if (name == "grad_strides") c.layouts.out_grad = numbers(text, ',');
    else if (name == "lengths") c.call.key_lengths = contiguous_type(DType::i32, {c.call.query.shape[0]}, c.call.query.device);
    else throw std::runtime_error("cudnn_cases: " + c.id + " has an unknown word " + word);
  }
  c.call.key = key.empty() ? c.call.query : tensor(key);
  c.call.value = value.empty() ? c.call.key : tensor(value);
  if (!scale_given) c.call.scale = 1.0 / std::sqrt(static_cast<double>(std::max<int64_t>(1, c.call.head_dim())));
  if (c.call.dropout_p > 0) c.call.seed = contiguous_type(DType::i64, {2}, c.call.query.device);
  if (c.call.training)
    for (TensorType* type : {&c.call.query, &c.call.key, &c.call.value}) type->requires_grad = true;
  return c;
}

std::vector<Case> read_cases(const std::string& path) {
  std::ifstream file(path);
  if (!file) throw std::runtime_error("cudnn_cases: cannot read " + path);
  std::vector<Case> cases;
  for (std::string line; std::getline(file, line);)
    if (!line.empty() && line[0] != '#') cases.push_back(parse_case(line));
  return cases;
}

}  // namespace fulmen::cudnn
