#include "ir/parse.h"

#include <charconv>
#include <limits>
#include <unordered_map>

#include "core/error.h"
#include "ir/verify.h"

namespace fulmen {
namespace {

constexpr int deepest_body = 8;

class Parser {
 public:
  Parser(std::string_view text, const OpLookup& lookup) : text_(text), lookup_(lookup) {}

  Trace whole() {
    Trace trace = parse_body(0);
    skip_space();
    if (at_ < text_.size()) fail("the end of the text");
    return trace;
  }

 private:
  [[noreturn]] void fail(const std::string& needed) const {
    size_t line = 1;
    for (size_t i = 0; i < at_ && i < text_.size(); ++i) line += text_[i] == '\n';
    std::string found = at_ < text_.size() ? std::string(text_.substr(at_, 20)) : "the end";
    for (char& c : found)
      if (c == '\n') c = ' ';
    throw ShapeError("trace text: line " + std::to_string(line) + " has '" + found + "', needed " + needed);
  }

  void skip_space() {
    while (at_ < text_.size()) {
      const char c = text_[at_];
      if (c == '#') {
        while (at_ < text_.size() && text_[at_] != '\n') ++at_;
      } else if (c == ' ' || c == '\n' || c == '\t' || c == '\r') {
        ++at_;
      } else {
        break;
      }
    }
  }

  bool peek(char c) {
    skip_space();
    return at_ < text_.size() && text_[at_] == c;
  }
  bool take(char c) {
    if (!peek(c)) return false;
    ++at_;
    return true;
  }
  void expect(char c) {
    if (!take(c)) fail(std::string("'") + c + "'");
  }

  static bool is_word(char c) { return isalnum(static_cast<unsigned char>(c)) || c == '_'; }

  std::string word(const char* needed) {
    skip_space();
    const size_t begin = at_;
    while (at_ < text_.size() && is_word(text_[at_])) ++at_;
    if (begin == at_) fail(needed);
    return std::string(text_.substr(begin, at_ - begin));
  }

  bool take_word(std::string_view wanted) {
    skip_space();
    if (text_.substr(at_, wanted.size()) != wanted) return false;
    const size_t end = at_ + wanted.size();
    if (end < text_.size() && is_word(text_[end])) return false;
    at_ = end;
    return true;
  }

  TensorType type() {
    skip_space();
    const size_t begin = at_;
    while (at_ < text_.size() && is_word(text_[at_])) ++at_;
    if (!take('[')) fail("a type such as f32[2,3]");
    while (at_ < text_.size() && text_[at_] != ']') ++at_;
    if (at_ >= text_.size()) fail("']'");
    ++at_;
    if (at_ < text_.size() && text_[at_] == '{') {
      while (at_ < text_.size() && text_[at_] != '}') ++at_;
      if (at_ >= text_.size()) fail("'}'");
      ++at_;
    }
    if (at_ < text_.size() && text_[at_] == '!') ++at_;
    TensorType result = parse_tensor_spec(text_.substr(begin, at_ - begin));
    if (at_ < text_.size() && text_[at_] == '@') {
      ++at_;
      const std::string kind = word("a device");
      if (kind == "meta") {
        result.device.kind = DeviceKind::meta;
      } else if (kind == "cuda") {
        result.device.kind = DeviceKind::cuda;
        if (take(':')) result.device.index = static_cast<int>(integer());
      } else {
        fail("cuda:N or meta as a device");
      }
    }
    if (take_word("number")) result.is_number = true;
    return result;
  }

  int64_t integer() {
    skip_space();
    int64_t value = 0;
    const auto [end, status] = std::from_chars(text_.data() + at_, text_.data() + text_.size(), value);
    if (status != std::errc()) fail("an integer");
    at_ = static_cast<size_t>(end - text_.data());
    return value;
  }

  AttrValue attribute() {
    skip_space();
    if (take('"')) {
      std::string out;
      while (at_ < text_.size() && text_[at_] != '"') {
        char c = text_[at_++];
        if (c == '\\' && at_ < text_.size()) {
          c = text_[at_++];
          if (c == 'n') c = '\n';
        }
        out += c;
      }
      if (at_ >= text_.size()) fail("'\"'");
      ++at_;
      return out;
    }
    if (take('[')) {
      Dims dims;
      while (!peek(']')) {
        dims.push_back(integer());
        if (!take(',')) break;
      }
      expect(']');
      return dims;
    }
    if (take_word("none")) return std::monostate{};
    if (take_word("true")) return true;
    if (take_word("false")) return false;
    if (take_word("nan")) return std::numeric_limits<double>::quiet_NaN();
    if (take_word("inf")) return std::numeric_limits<double>::infinity();
    if (text_.substr(at_, 4) == "-inf") {
      at_ += 4;
      return -std::numeric_limits<double>::infinity();
    }
    if (at_ < text_.size() && isalpha(static_cast<unsigned char>(text_[at_]))) {
      const size_t before = at_;
      const auto dtype = parse_dtype(word("a value"));
      if (dtype) return *dtype;
      at_ = before;
      fail("a value: none, true, false, a number, text in quotes, a list of integers or a dtype");
    }
    const size_t begin = at_;
    while (at_ < text_.size() && (is_word(text_[at_]) || text_[at_] == '.' || text_[at_] == '-' || text_[at_] == '+')) ++at_;
    const std::string_view token = text_.substr(begin, at_ - begin);
    if (token.find_first_of(".e") == std::string_view::npos) {
      int64_t value = 0;
      const auto [end, status] = std::from_chars(token.data(), token.data() + token.size(), value);
      if (status == std::errc() && end == token.data() + token.size() && !token.empty()) return value;
    } else {
      double value = 0;
      const auto [end, status] = std::from_chars(token.data(), token.data() + token.size(), value);
      if (status == std::errc() && end == token.data() + token.size()) return value;
    }
    at_ = begin;
    fail("a value: none, true, false, a number, text in quotes, a list of integers or a dtype");
  }

  struct Scope {
    Trace trace;
    std::unordered_map<std::string, ValueId> names;

    ValueId define(const std::string& name, TensorType type, const Parser& parser) {
      const auto id = static_cast<ValueId>(trace.values.size());
      if (!names.emplace(name, id).second) parser.fail("a name other than '" + name + "', which is taken");
      trace.values.push_back({std::move(type), name});
      return id;
    }
  };

  ValueId use(Scope& scope) {
    const size_t before = at_;
    const std::string name = word("a value's name");
    if (name == "none") return no_value;
    const auto found = scope.names.find(name);
    if (found == scope.names.end()) {
      at_ = before;
      fail("the name of a value defined above");
    }
    return found->second;
  }

  void result(Scope& scope, Node& node) {
    const std::string name = word("a result's name");
    if (name == "_") {
      node.outputs.push_back(no_value);
      return;
    }
    expect(':');
    node.outputs.push_back(scope.define(name, type(), *this));
  }

  void node(Scope& scope, int depth) {
    Node made;
    // Results are defined after the operands are read, so that a node cannot use itself.
    Node results;
    Scope* const target = &scope;
    const size_t names_before = target->trace.values.size();
    if (take('(')) {
      while (!peek(')')) {
        result(scope, results);
        if (!take(',')) break;
      }
      expect(')');
    } else {
      result(scope, results);
    }
    expect('=');
    const size_t op_at = at_;
    const std::string op = word("an op's name");
    made.op = lookup_(op);
    if (!made.op) {
      at_ = op_at;
      fail("the name of an op in the catalogue");
    }
    expect('(');
    while (!peek(')')) {
      const size_t before = at_;
      skip_space();
      const std::string name = word("an operand or attribute");
      if (take('=')) {
        made.attrs.set(name, attribute());
      } else {
        at_ = before;
        const ValueId id = use(scope);
        if (id != no_value && static_cast<size_t>(id) >= names_before) fail("an operand defined above this node");
        made.inputs.push_back(id);
      }
      if (!take(',')) break;
    }
    expect(')');
    if (take('@')) made.executor = word("an executor's name");
    skip_space();
    if (text_.substr(at_, 6) == "trace ") {
      if (depth >= deepest_body) fail("fewer nested bodies");
      made.body = std::make_shared<const Trace>(parse_body(depth + 1));
    }
    made.outputs = std::move(results.outputs);
    scope.trace.nodes.push_back(std::move(made));
  }

  Trace parse_body(int depth) {
    if (!take_word("trace")) fail("'trace'");
    Scope scope;
    scope.trace.name = word("the trace's name");
    expect('(');
    while (!peek(')')) {
      const std::string name = word("an input's name");
      expect(':');
      scope.trace.inputs.push_back(scope.define(name, type(), *this));
      if (!take(',')) break;
    }
    expect(')');
    expect('{');
    while (!take_word("return")) node(scope, depth);
    while (!peek('}')) {
      scope.trace.outputs.push_back(use(scope));
      if (!take(',')) break;
    }
    expect('}');
    return std::move(scope.trace);
  }

  std::string_view text_;
  const OpLookup& lookup_;
  size_t at_ = 0;
};

}  // namespace

Trace parse_trace(std::string_view text, const OpLookup& lookup) {
  Trace trace = Parser(text, lookup).whole();
  try {
    verify(trace, "reading the text");
  } catch (const InternalError& error) {  // here it's the text's fault
    throw ShapeError("trace text: " + std::string(error.what()).substr(std::string_view("internal: ").size()));
  }
  return trace;
}

}  // namespace fulmen
