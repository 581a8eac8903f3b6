#include "executors/cpu/moving/strided_copy.h"

#include <algorithm>
#include <cstring>

#include "core/parallel.h"

namespace fulmen::cpu {
namespace {

constexpr int64_t grain_elements = 16384;

// The shape without size-1 dims and with neighbours merged where both sides allow it; ordered so that the last dim is
// the one that lies closest in `to`.
struct Walk {
  Dims shape, from, to;
};

Walk simplified(const Dims& shape, const Dims& from, const Dims& to) {
  std::vector<size_t> order;
  for (size_t d = 0; d < shape.size(); ++d)
    if (shape[d] != 1) order.push_back(d);
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return to[a] > to[b]; });
  Walk walk;
  for (size_t d : order) {
    if (!walk.shape.empty() && walk.from.back() == from[d] * shape[d] && walk.to.back() == to[d] * shape[d]) {
      walk.shape.back() *= shape[d];
      walk.from.back() = from[d];
      walk.to.back() = to[d];
    } else {
      walk.shape.push_back(shape[d]);
      walk.from.push_back(from[d]);
      walk.to.push_back(to[d]);
    }
  }
  if (walk.shape.empty()) walk.shape = {1}, walk.from = {1}, walk.to = {1};
  return walk;
}

template <class T>
void copy_row(const T* from, int64_t from_stride, T* to, int64_t to_stride, int64_t count) {
  if (from_stride == 1 && to_stride == 1) {
    std::memcpy(to, from, static_cast<size_t>(count) * sizeof(T));
  } else if (from_stride == 0 && to_stride == 1) {
    std::fill_n(to, count, *from);
  } else {
    for (int64_t i = 0; i < count; ++i) to[i * to_stride] = from[i * from_stride];
  }
}

template <class T>
void walk_rows(const Walk& walk, const T* from, T* to) {
  const int64_t cols = walk.shape.back(), from_step = walk.from.back(), to_step = walk.to.back();
  const size_t outer = walk.shape.size() - 1;
  int64_t rows = 1;
  for (size_t d = 0; d < outer; ++d) rows *= walk.shape[d];
  const auto at = [&](int64_t row, const Dims& strides) {
    int64_t offset = 0;
    for (size_t d = outer; d-- > 0;) {
      offset += row % walk.shape[d] * strides[d];
      row /= walk.shape[d];
    }
    return offset;
  };
  // The dim above in blocks, where only one side has neighbours along the last dim: cache lines are used whole.
  const bool crosses = outer > 0 && from_step != 1 && from_step != 0 && walk.from[outer - 1] == 1;
  if (crosses) {
    const int64_t above = walk.shape[outer - 1], blocks = (above + 31) / 32, planes = rows / above;
    parallel_for(planes * blocks, std::max<int64_t>(1, grain_elements / (32 * cols)), [&](int64_t begin, int64_t end) {
      for (int64_t job = begin; job < end; ++job) {
        const int64_t first = job / blocks * above + job % blocks * 32, count = std::min<int64_t>(32, above - job % blocks * 32);
        const T* source = from + at(first, walk.from);
        T* target = to + at(first, walk.to);
        const int64_t target_above = walk.to[outer - 1];
        for (int64_t c = 0; c < cols; c += 32)
          for (int64_t r = 0; r < count; ++r)
            for (int64_t i = c; i < std::min(cols, c + 32); ++i) target[r * target_above + i * to_step] = source[r + i * from_step];
      }
    });
    return;
  }
  if (rows == 1) {
    parallel_for(cols, grain_elements * 4, [&](int64_t begin, int64_t end) {
      copy_row(from + begin * from_step, from_step, to + begin * to_step, to_step, end - begin);
    });
    return;
  }
  parallel_for(rows, std::max<int64_t>(1, grain_elements / cols), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) copy_row(from + at(row, walk.from), from_step, to + at(row, walk.to), to_step, cols);
  });
}

template <class T>
void copy_as(const Dims& shape, const Strided& from, const Strided& to) {
  walk_rows(simplified(shape, from.strides, to.strides), static_cast<const T*>(from.memory) + from.offset, static_cast<T*>(to.memory) + to.offset);
}

}  // namespace

void copy_strided(size_t element_bytes, const Dims& shape, const Strided& from, const Strided& to) {
  if (element_count(shape) == 0) return;
  switch (element_bytes) {
    case 1: return copy_as<uint8_t>(shape, from, to);
    case 2: return copy_as<uint16_t>(shape, from, to);
    case 4: return copy_as<uint32_t>(shape, from, to);
    default: return copy_as<uint64_t>(shape, from, to);
  }
}

void fill_strided(size_t element_bytes, const Dims& shape, const void* value, const Strided& to) {
  copy_strided(element_bytes, shape, {const_cast<void*>(value), 0, Dims(shape.size(), 0)}, to);
}

}  // namespace fulmen::cpu
