#include "ops_cpu/attention.h"

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>

#include "ops_cpu/attention_plan.h"
#include "ops_cpu/query_block.h"

namespace kvq {
namespace {

// Partial results that a thread keeps room for.
constexpr int64_t kKeptFloats = 32768;

// A block of queries against tiles and exact tokens.
class Block : public QueryBlock {
 public:
  using QueryBlock::QueryBlock;

  void run(int64_t split, float* partial) {
    begin_part();
    if (split < plan_.splits) {
      const int64_t first = first_tile(c_, row_), tiles = row_.tiles - first;
      attend_tiles(first, first + tiles * split / plan_.splits,
                   first + tiles * (split + 1) / plan_.splits);
    } else {
      attend_exact();
    }
    store(partial);
  }

 private:
  void attend_tiles(int64_t first, int64_t begin, int64_t end) {
    if (begin >= end) return;
    // Tiles prefetch those that follow, also across splits; nothing precedes the first.
    for (int64_t tile = first; begin == first && tile < std::min(first + kAhead, end); ++tile)
      prefetch(record_of(tile), 0, f_.record_bytes);
    rotate_query();
    for (int64_t tile = begin; tile < end; ++tile) {
      const int64_t token = c_.sink_tokens + tile * kTileTokens;
      const int64_t left = c_.sink_tokens + row_.quantized - token;
      const int count = static_cast<int>(std::min<int64_t>(kTileTokens, left));
      if (!visible(row_.start + token, count)) continue;
      attend_tile(record_of(tile), record_after(tile), row_.start + token, count);
    }
  }

  void attend_tile(const uint8_t* record, const uint8_t* next, int64_t position, int count) {
    score_tile(record, next);
    for (int r = 0; r < rows_; ++r) mask_row(r, position, count, logits_ + r * kTileTokens);
    weigh();
    accumulate_tile(record, next);
  }

  void attend_exact() {
    const auto* key = static_cast<const uint8_t*>(c_.exact_key);
    const auto* value = static_cast<const uint8_t*>(c_.exact_value);
    const int64_t item = size_of(c_.type);
    key += (batch_ * c_.exact_key_stride[0] + head_ * c_.exact_key_stride[1]) * item;
    value += (batch_ * c_.exact_value_stride[0] + head_ * c_.exact_value_stride[1]) * item;
    const int64_t key_step = c_.exact_key_stride[2], value_step = c_.exact_value_stride[2];

    const int64_t sinks = row_.quantized ? c_.sink_tokens : row_.tokens;
    attend_rows(key, key_step, value, value_step, 0, sinks);
    if (row_.quantized == 0) return;
    if (f_.pass_through()) {
      for (int64_t tile = 0; tile < row_.tiles; ++tile) {
        const uint8_t* record = record_of(tile);
        attend_rows(record + f_.key_code, f_.key_dim, record + f_.value_code, f_.value_dim,
                    c_.sink_tokens + tile * kTileTokens,
                    std::min<int64_t>(kTileTokens, row_.quantized - tile * kTileTokens));
      }
    }
    attend_rows(key + sinks * key_step * item, key_step, value + sinks * value_step * item,
                value_step, c_.sink_tokens + row_.quantized,
                row_.tokens - c_.sink_tokens - row_.quantized);
  }

  // `count` exact tokens that lie one after the other, the first of them token `token` of the row.
  void attend_rows(const uint8_t* key, int64_t key_step, const uint8_t* value, int64_t value_step,
                   int64_t token, int64_t count) {
    const int64_t item = size_of(c_.type);
    for (int64_t done = 0; done < count; done += kTileTokens) {
      const int n = static_cast<int>(std::min<int64_t>(kTileTokens, count - done));
      const int64_t position = row_.start + token + done;
      if (!visible(position, n)) continue;
      attend_chunk(key + done * key_step * item, key_step, value + done * value_step * item,
                   value_step, position, n);
    }
  }

  void attend_chunk(const uint8_t* key, int64_t key_step, const uint8_t* value, int64_t value_step,
                    int64_t position, int count) {
    const ExactAttentionKernels& k = *kernels_.exact;
    const int64_t item = size_of(c_.type);
    k.score_exact(key, c_.type, key_step, count, f_.key_dim, s_.query.data(), rows_, value,
                  value_step * item, static_cast<int>(f_.value_dim * item), logits_);
    for (int r = 0; r < rows_; ++r) mask_row(r, position, count, logits_ + r * kTileTokens);
    weigh();
    int zeros = 0;
    for (int r = 0; r < rows_; ++r)
      for (int t = 0; t < count; ++t) zeros += s_.p[r * kTileTokens + t] == 0.0f;
    k.accumulate_exact(value, c_.type, value_step, count, f_.value_dim, s_.p, rows_, zeros > 0,
                       s_.acc.data());
  }
};

}  // namespace

void check_lengths(const int32_t* lengths, const int32_t* block_table, int64_t batch,
                   int64_t max_pages, int64_t pages, int64_t capacity, int64_t sink_tokens) {
  for (int64_t b = 0; b < batch; ++b) {
    const Row r = read_row(lengths, b);
    if (r.start < 0 || r.length < 0 || r.quantized < 0 ||
        r.quantized > std::max<int64_t>(r.tokens - sink_tokens, 0) ||
        r.tokens - r.quantized > capacity || r.tiles > max_pages)
      throw std::out_of_range("lengths[" + std::to_string(b) + "] = (start " +
                              std::to_string(r.start) + ", length " + std::to_string(r.length) +
                              ", quantized " + std::to_string(r.quantized) + ") does not fit " +
                              std::to_string(max_pages) + " pages, " + std::to_string(capacity) +
                              " exact tokens and sink_tokens=" + std::to_string(sink_tokens));
    for (int64_t n = 0; n < r.tiles; ++n) {
      const int64_t page = block_table[b * max_pages + n];
      if (page < 0 || page >= pages)
        throw std::out_of_range("block_table[" + std::to_string(b) + ", " + std::to_string(n) +
                                "] must be in [0, " + std::to_string(pages) + "), got " +
                                std::to_string(page));
    }
  }
}

void attention(const Kernels& kernels, const AttentionCall& call, const ParallelFor& parallel_for) {
  const Plan plan(call);
  const int64_t block_floats = std::min<int64_t>(kMaxRows, plan.rows) * plan.partial_stride;
  const int64_t floats = plan.items() * plan.parts * block_floats;
  // A step's results stay in memory that was used before; those of a long call are given back.
  static thread_local float kept[kKeptFloats];
  const std::unique_ptr<float[]> large(floats > kKeptFloats ? new float[floats] : nullptr);
  float* partial = large ? large.get() : kept;
  parallel_for(plan.items() * plan.parts, [&](int64_t begin, int64_t end) {
    for (int64_t u = begin; u < end;) {
      const int64_t item = u / plan.parts, last = std::min(end, (item + 1) * plan.parts);
      Block block(kernels, plan, item);
      for (; u < last; ++u) block.run(u % plan.parts, partial + u * block_floats);
    }
  });
  parallel_for(plan.items(), [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t block = item % plan.blocks, head = item / plan.blocks % call.kv_heads;
      const int64_t batch = item / plan.blocks / call.kv_heads;
      const int64_t last = std::min<int64_t>(kMaxRows, plan.rows - block * kMaxRows);
      for (int64_t r = 0; r < last; ++r) {
        const int64_t row = block * kMaxRows + r;
        merge_row(kernels, plan,
                  partial + item * plan.parts * block_floats + r * plan.partial_stride,
                  block_floats, batch, head * plan.group + row % plan.group, row / plan.group);
      }
    }
  });
}

}  // namespace kvq
