// The gradient of an additive mask, in the mask's own shape. Tiles of score gradients arrive from many threads; where
// the mask is broadcast over batch or heads, parts are added in the order of (batch, head), kept by a ticket a tile, so
// that sums do not depend on the number of threads. Compiled per target; used by backward.matrix.cpp.
//   direct    no broadcast: each element is written once
//   reduced   broadcast over batch, heads or queries: f32 sums of the mask's size, converted at the end; an f32 result
//             that is broadcast over batch or heads alone holds the sums itself
//   row_sums  broadcast over keys: an f32 sum a row, to which key blocks add in order (the caller's), reduced at the end
// Blocks of packed sequences lie anywhere and don't cover the mask: all sums begin at zero then.
#pragma once

#include <atomic>
#include <memory>

#include <sched.h>

#include "core/parallel.h"
#include "executors/cpu/attention/pack.h"

namespace fulmen::cpu::FULMEN_TARGET {

// Tickets only ever wait for work that another thread has begun.
inline void wait_until(const std::atomic<int64_t>& ticket, int64_t value) {
  for (int spins = 0; ticket.load(std::memory_order_acquire) < value; ++spins) {
#if defined(__x86_64__)
    if (spins < 256) {
      _mm_pause();
      continue;
    }
#endif
    sched_yield();
  }
}

class MaskGradient {
 public:
  static int64_t scratch_floats(const AttentionArguments& a) {
    switch (form_of(a)) {
      case Form::none:
      case Form::direct: return 0;
      case Form::reduced: return sums_in_place(a) ? 0 : a.mask_shape[0] * a.mask_shape[1] * a.mask_shape[2] * a.key_len;
      case Form::row_sums: return a.batch * a.heads * a.query_len;
    }
    return 0;
  }

  void prepare(const AttentionArguments& a, void* output, float* scratch, int64_t key_blocks, int64_t block_keys, int64_t query_blocks,
               int64_t block_queries) {
    form_ = form_of(a);
    if (form_ == Form::none) return;
    a_ = &a;
    output_ = output;
    scratch_ = scratch;
    block_keys_ = block_keys;
    block_queries_ = block_queries;
    packed_ = a.sequences > 0;
    // Places of blocks: each of the sequences, and what lies before and behind them, may begin one of its own.
    const int64_t more = packed_ ? a.sequences + 2 : 0;
    key_places_ = std::max<int64_t>(key_blocks + more, 1);
    query_places_ = std::max<int64_t>(query_blocks + more, 1);
    batch_ranks_ = a.mask_shape[0] == 1 ? 1 : 0;
    head_ranks_ = a.mask_shape[1] == 1 ? 1 : 0;
    in_place_ = sums_in_place(a);
    // Other sums begin with the first tile that arrives.
    if (packed_ && (form_ == Form::direct || in_place_)) {
      const std::vector<float> zeros(static_cast<size_t>(a.key_len), 0.0f);
      for_each_row([&](int64_t b, int64_t h, int64_t i) { write_row(zeros.data(), b, h, i); });
    } else if (packed_ || form_ == Form::row_sums || (form_ == Form::reduced && a.mask_shape[2] == 1)) {
      const int64_t floats = scratch_floats(a);
      parallel_for(floats, 1 << 16, [&](int64_t begin, int64_t end) { std::memset(scratch + begin, 0, static_cast<size_t>(end - begin) * 4); });
    }
    if (form_ == Form::reduced)
      tickets_ = std::make_unique<std::atomic<int64_t>[]>(static_cast<size_t>(a.mask_shape[0] * a.mask_shape[1] * query_places_ * key_places_));
  }

  bool wanted() const { return form_ != Form::none; }
  bool sums_rows() const { return form_ == Form::row_sums; }

  // For row_sums alone: sums over a key block of each of `count` rows. The caller keeps key blocks in order.
  static void sum_rows(int64_t count, int64_t from, int64_t to, const float* tile, int64_t tile_row, float* sums) {
    for (int64_t r = 0; r < count; ++r) {
      sums[r] = 0.0f;
      for (int64_t c = from; c < to; ++c) sums[r] += tile[r * tile_row + c];
    }
  }
  void add_rows(int64_t batch, int64_t head, int64_t first, int64_t count, const float* sums) {
    float* total = scratch_ + (batch * a_->heads + head) * a_->query_len + first;
    for (int64_t r = 0; r < count; ++r) total[r] += sums[r];
  }

  // Score gradients of queries [first, first + count) and columns [from, to) of a key block `width` wide; zero elsewhere
  // in the block. Places are local to the segment. Every (segment, head, query block, key block) must come by once.
  void add(const AttentionSegment& segment, int64_t segment_index, int64_t head, int64_t first, int64_t count, int64_t key_first, int64_t width,
           int64_t from, int64_t to, int64_t key_block, int64_t query_block, const float* tile, int64_t tile_row) {
    const AttentionArguments& a = *a_;
    const int64_t batch = segment.batch;
    first += segment.query_begin;
    key_first += segment.key_begin;
    if (form_ == Form::direct) {
      const int64_t stride = a.mask_grad.stride[3];
      const std::vector<float> zeros(static_cast<size_t>(std::max(from, width - to)), 0.0f);
      for (int64_t r = 0; r < count; ++r) {
        const int64_t at = a.mask_grad.offset(batch, head, first + r) + key_first * stride;
        narrow_row(zeros.data(), from, output_, a.mask_grad.dtype, at, stride);
        if (from < to) narrow_row(tile + r * tile_row + from, to - from, output_, a.mask_grad.dtype, at + from * stride, stride);
        narrow_row(zeros.data(), width - to, output_, a.mask_grad.dtype, at + to * stride, stride);
      }
      return;
    }
    if (form_ == Form::row_sums) return;
    const bool one_row = a.mask_shape[2] == 1;
    const int64_t mask_batch = batch_ranks_ ? 0 : batch, mask_head = head_ranks_ ? 0 : head;
    std::atomic<int64_t>& ticket = ticket_of(segment, segment_index, head, one_row ? -1 : query_block, key_block);
    wait_until(ticket, rank(batch, head));
    const bool begins = !one_row && !packed_ && rank(batch, head) == 0;
    for (int64_t r = 0; r < count && (begins || from < to); ++r) {
      float* sum = in_place_ ? static_cast<float*>(output_) + a.mask_grad.offset(mask_batch, mask_head, first + r) + key_first
                             : scratch_ + ((mask_batch * a.mask_shape[1] + mask_head) * a.mask_shape[2] + (one_row ? 0 : first + r)) * a.key_len + key_first;
      if (begins) {
        std::memset(sum, 0, static_cast<size_t>(from) * 4);
        if (from < to) std::memcpy(sum + from, tile + r * tile_row + from, static_cast<size_t>(to - from) * 4);
        std::memset(sum + to, 0, static_cast<size_t>(width - to) * 4);
        continue;
      }
      const float* part = tile + r * tile_row;
      int64_t c = from;
      for (; c + lanes <= to; c += lanes) store(sum + c, load(sum + c) + load(part + c));
      for (; c < to; ++c) sum[c] += part[c];
    }
    if (!one_row) ticket.store(rank(batch, head) + 1, std::memory_order_release);
  }

  // After all query blocks of a head came by for a key block.
  void finish_head(const AttentionSegment& segment, int64_t segment_index, int64_t head, int64_t key_block) {
    if (form_ != Form::reduced || a_->mask_shape[2] != 1) return;
    std::atomic<int64_t>& ticket = ticket_of(segment, segment_index, head, -1, key_block);
    wait_until(ticket, rank(segment.batch, head));
    ticket.store(rank(segment.batch, head) + 1, std::memory_order_release);
  }

  void finish() {
    const AttentionArguments* a = a_;
    if (form_ == Form::reduced && !in_place_) {
      for_each_row([&](int64_t b, int64_t h, int64_t i) {
        write_row(scratch_ + ((b * a->mask_shape[1] + h) * a->mask_shape[2] + i) * a->key_len, b, h, i);
      });
    } else if (form_ == Form::row_sums) {
      for_each_row([&](int64_t b, int64_t h, int64_t i) {
        double sum = 0.0;
        for (int64_t batch = b; batch < (batch_ranks_ ? a->batch : b + 1); ++batch)
          for (int64_t head = h; head < (head_ranks_ ? a->heads : h + 1); ++head)
            for (int64_t row = i; row < (a->mask_shape[2] == 1 ? a->query_len : i + 1); ++row)
              sum += scratch_[(batch * a->heads + head) * a->query_len + row];
        const float narrow = static_cast<float>(sum);
        narrow_row(&narrow, 1, output_, a->mask_grad.dtype, a->mask_grad.offset(b, h, i), 1);
      });
    }
  }

 private:
  enum class Form { none, direct, reduced, row_sums };

  static Form form_of(const AttentionArguments& a) {
    if (!a.mask_grad.present) return Form::none;
    if (a.mask_shape[3] != a.key_len) return Form::row_sums;
    const bool full = a.mask_shape[0] == a.batch && a.mask_shape[1] == a.heads && a.mask_shape[2] == a.query_len;
    return full ? Form::direct : Form::reduced;
  }

  static bool sums_in_place(const AttentionArguments& a) {
    return form_of(a) == Form::reduced && a.mask_shape[2] == a.query_len && a.mask_shape[2] != 1 && a.mask_grad.dtype == DType::f32 &&
           a.mask_grad.stride[3] == 1;
  }

  template <class F>
  void for_each_row(const F& body) const {
    const int64_t heads = a_->mask_shape[1], rows = a_->mask_shape[2];
    parallel_for(a_->mask_shape[0] * heads * rows, 16, [&](int64_t begin, int64_t end) {
      for (int64_t at = begin; at < end; ++at) body(at / (heads * rows), at / rows % heads, at % rows);
    });
  }
  void write_row(const float* row, int64_t b, int64_t h, int64_t i) const {
    narrow_row(row, a_->key_len, output_, a_->mask_grad.dtype, a_->mask_grad.offset(b, h, i), a_->mask_grad.stride[3]);
  }
  int64_t rank(int64_t batch, int64_t head) const {
    return batch_ranks_ ? batch * (head_ranks_ ? a_->heads : 1) + (head_ranks_ ? head : 0) : head_ranks_ ? head : 0;
  }
  // query_block -1: all queries share a row of sums.
  std::atomic<int64_t>& ticket_of(const AttentionSegment& segment, int64_t segment_index, int64_t head, int64_t query_block, int64_t key_block) const {
    const int64_t mask_batch = batch_ranks_ ? 0 : segment.batch, mask_head = head_ranks_ ? 0 : head;
    int64_t query = std::max<int64_t>(query_block, 0), key = key_block;
    if (packed_) {
      key += segment.key_begin / block_keys_ + segment_index;
      if (query_block >= 0) query += segment.query_begin / block_queries_ + segment_index;
    }
    return tickets_[static_cast<size_t>(((mask_batch * a_->mask_shape[1] + mask_head) * query_places_ + query) * key_places_ + key)];
  }

  Form form_ = Form::none;
  const AttentionArguments* a_ = nullptr;
  void* output_ = nullptr;
  float* scratch_ = nullptr;
  int64_t block_keys_ = 1, block_queries_ = 1, key_places_ = 1, query_places_ = 1;
  bool batch_ranks_ = false, head_ranks_ = false, in_place_ = false, packed_ = false;
  std::unique_ptr<std::atomic<int64_t>[]> tickets_;
};

}  // namespace fulmen::cpu::FULMEN_TARGET
