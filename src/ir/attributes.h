// The constants of a node: small, ordered by name, printable. Values are none, bool, integer, float, text, a list of
// integers or a dtype.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "core/tensor_type.h"

namespace fulmen {

using AttrValue = std::variant<std::monostate, bool, int64_t, double, std::string, Dims, DType>;

std::string to_string(const AttrValue& value);  // none, true, 3, 0.5, "text", [1,2], bf16

class Attributes {
 public:
  Attributes() = default;
  Attributes(std::initializer_list<std::pair<std::string, AttrValue>> items);

  void set(std::string_view name, AttrValue value);
  void erase(std::string_view name);
  const AttrValue* find(std::string_view name) const;
  bool has(std::string_view name) const;  // present and not none

  // The value as the type asked for; an integer is taken for a float and 0/1 for a bool. Absent, none or another type
  // is an InternalError: callers read what the op's signature promises.
  bool get_bool(std::string_view name) const;
  int64_t get_int(std::string_view name) const;
  double get_float(std::string_view name) const;
  const std::string& get_text(std::string_view name) const;
  const Dims& get_dims(std::string_view name) const;
  DType get_dtype(std::string_view name) const;

  auto begin() const { return items_.begin(); }
  auto end() const { return items_.end(); }
  size_t size() const { return items_.size(); }
  bool operator==(const Attributes&) const = default;

 private:
  std::vector<std::pair<std::string, AttrValue>> items_;  // sorted by name
};

}  // namespace fulmen
