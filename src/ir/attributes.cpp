#include "ir/attributes.h"

#include <algorithm>
#include <charconv>
#include <cmath>

#include "core/error.h"

namespace fulmen {
namespace {

std::string quote(const std::string& text) {
  std::string out = "\"";
  for (char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    if (c == '\n') {
      out += "\\n";
      continue;
    }
    out += c;
  }
  return out + '"';
}

std::string float_text(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  char buffer[40];
  const auto end = std::to_chars(buffer, buffer + sizeof(buffer), value).ptr;
  std::string text(buffer, end);
  if (text.find_first_of(".e") == std::string::npos) text += ".0";
  return text;
}

auto lower_bound(auto& items, std::string_view name) {
  return std::lower_bound(items.begin(), items.end(), name, [](const auto& item, std::string_view n) { return item.first < n; });
}

[[noreturn]] void wrong(std::string_view name, const AttrValue* value, const char* needed) {
  throw InternalError("internal: attribute " + std::string(name) + " is " + (value ? to_string(*value) : "absent") + ", needed " + needed);
}

}  // namespace

std::string to_string(const AttrValue& value) {
  struct Visitor {
    std::string operator()(std::monostate) const { return "none"; }
    std::string operator()(bool v) const { return v ? "true" : "false"; }
    std::string operator()(int64_t v) const { return std::to_string(v); }
    std::string operator()(double v) const { return float_text(v); }
    std::string operator()(const std::string& v) const { return quote(v); }
    std::string operator()(const Dims& v) const { return to_string(v); }
    std::string operator()(DType v) const { return std::string(dtype_name(v)); }
  };
  return std::visit(Visitor{}, value);
}

Attributes::Attributes(std::initializer_list<std::pair<std::string, AttrValue>> items) {
  for (const auto& [name, value] : items) set(name, value);
}

void Attributes::set(std::string_view name, AttrValue value) {
  const auto at = lower_bound(items_, name);
  if (at != items_.end() && at->first == name)
    at->second = std::move(value);
  else
    items_.insert(at, {std::string(name), std::move(value)});
}

void Attributes::erase(std::string_view name) {
  const auto at = lower_bound(items_, name);
  if (at != items_.end() && at->first == name) items_.erase(at);
}

const AttrValue* Attributes::find(std::string_view name) const {
  const auto at = lower_bound(items_, name);
  return at != items_.end() && at->first == name ? &at->second : nullptr;
}

bool Attributes::has(std::string_view name) const {
  const AttrValue* value = find(name);
  return value && !std::holds_alternative<std::monostate>(*value);
}

bool Attributes::get_bool(std::string_view name) const {
  const AttrValue* value = find(name);
  if (value) {
    if (const bool* b = std::get_if<bool>(value)) return *b;
    if (const int64_t* i = std::get_if<int64_t>(value)) return *i != 0;
  }
  wrong(name, value, "a bool");
}

int64_t Attributes::get_int(std::string_view name) const {
  const AttrValue* value = find(name);
  if (value) {
    if (const int64_t* i = std::get_if<int64_t>(value)) return *i;
    if (const bool* b = std::get_if<bool>(value)) return *b;
  }
  wrong(name, value, "an integer");
}

double Attributes::get_float(std::string_view name) const {
  const AttrValue* value = find(name);
  if (value) {
    if (const double* d = std::get_if<double>(value)) return *d;
    if (const int64_t* i = std::get_if<int64_t>(value)) return static_cast<double>(*i);
    if (const bool* b = std::get_if<bool>(value)) return *b;
  }
  wrong(name, value, "a float");
}

const std::string& Attributes::get_text(std::string_view name) const {
  const AttrValue* value = find(name);
  if (value)
    if (const auto* text = std::get_if<std::string>(value)) return *text;
  wrong(name, value, "text");
}

const Dims& Attributes::get_dims(std::string_view name) const {
  const AttrValue* value = find(name);
  if (value)
    if (const auto* dims = std::get_if<Dims>(value)) return *dims;
  wrong(name, value, "a list of integers");
}

DType Attributes::get_dtype(std::string_view name) const {
  const AttrValue* value = find(name);
  if (value)
    if (const auto* dtype = std::get_if<DType>(value)) return *dtype;
  wrong(name, value, "a dtype");
}

}  // namespace fulmen
