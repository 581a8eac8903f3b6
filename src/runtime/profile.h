// Where the time of running programs goes: time and calls of each instruction, summed over all runs while a profile is
// active. Thread-safe.
#pragma once

#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

namespace fulmen {

class Profile {
 public:
  struct Row {
    std::string executor, op, text;
    int64_t calls = 0;
    double ms = 0;
  };

  void add(const std::string& executor, const std::string& op, const std::string& text, double ms) {
    std::lock_guard lock(mutex_);
    Row& row = rows_[text];
    if (row.calls++ == 0) {
      row.executor = executor;
      row.op = op;
      row.text = text;
    }
    row.ms += ms;
  }

  std::vector<Row> rows() const {
    std::lock_guard lock(mutex_);
    std::vector<Row> rows;
    for (const auto& [text, row] : rows_) rows.push_back(row);
    return rows;
  }

 private:
  mutable std::mutex mutex_;
  std::map<std::string, Row> rows_;
};

}  // namespace fulmen
