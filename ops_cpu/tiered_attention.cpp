#include "ops_cpu/tiered_attention.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "ops_cpu/best_tokens.h"
#include "ops_cpu/exp2.h"
#include "ops_cpu/query_block.h"

namespace kvq {
namespace {

constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();

// exp(-16): what a value must weigh beside the greatest to be read.
constexpr float kLeastWeight = 1.12535175e-7f;

constexpr int64_t kMinNearPerSplit = 512;

// Floats of partial results that are in use at a time, unless one round of units needs more.
constexpr int64_t kWantedFloats = 1 << 19;
constexpr int64_t kLeastItems = 8;

// Partial results of a row: its sums, maximum and denominator as in Plan, then the scores and the
// tokens of its candidates. Beside them, per item and row, the logits of the near slots.
struct TieredPlan : Plan {
  explicit TieredPlan(const TieredCall& call) : Plan(call), tiered(call) {
    for (int64_t i = 0; i < call.batch * call.kv_heads; ++i)
      slots = std::max<int64_t>(slots, call.near_count[i]);
    if (call.fp8) rotated = 0;
    parts = splits + std::max<int64_t>(share(slots, kMinNearPerSplit), 1);
    partial_stride += 2 * call.candidates;
    block_floats = std::min<int64_t>(kMaxRows, rows) * partial_stride;
    near_floats = call.candidates ? std::min<int64_t>(kMaxRows, rows) * slots : 0;
    item_floats = parts * block_floats + near_floats;
  }

  const TieredCall& tiered;
  int64_t slots = 0;  // near slots in use, the most of any head
  int64_t block_floats, near_floats, item_floats;
};

// The logits of the last tiles, of which the best tokens are taken together.
struct Chunk {
  alignas(64) float logits[kSelectTiles * kMaxRows * kTileTokens];
  int64_t token[kSelectTiles];  // first of every tile
};

Chunk& chunk() {
  static thread_local Chunk instance;
  return instance;
}

// A block of queries against far tiles and near tokens.
class Block : public QueryBlock {
 public:
  Block(const Kernels& kernels, const TieredPlan& plan, int64_t item)
      : QueryBlock(kernels, plan, item),
        tiered_(plan.tiered),
        slots_(plan.slots),
        owner_(batch_ * c_.kv_heads + head_),
        chunk_(chunk()) {}

  // Returns the far values that were not read.
  int32_t run(int64_t part, float* partial, float* near_logits) {
    begin_part();
    skipped_ = 0;
    for (int r = 0; r < rows_; ++r) best_[r].clear(static_cast<int>(tiered_.candidates));
    if (part < plan_.splits) {
      const int64_t first = first_tile(c_, row_), tiles = row_.tiles - first;
      attend_tiles(first, first + tiles * part / plan_.splits,
                   first + tiles * (part + 1) / plan_.splits);
    } else {
      const int64_t split = part - plan_.splits, splits = plan_.parts - plan_.splits;
      const int64_t count = tiered_.near_count[owner_];
      attend_near(count * split / splits, count * (split + 1) / splits, near_logits);
    }
    store(partial);
    for (int r = 0; r < rows_; ++r)
      best_[r].store(partial + r * plan_.partial_stride + f_.value_dim + 2);
    return skipped_;
  }

 private:
  void attend_tiles(int64_t first, int64_t begin, int64_t end) {
    if (begin >= end) return;
    const int64_t record_bytes = tiered_.fp8 ? tiered_.far.record_bytes : f_.record_bytes;
    for (int64_t tile = first; begin == first && tile < std::min(first + kAhead, end); ++tile)
      prefetch(record_of(tile), 0, record_bytes);
    if (!tiered_.fp8) rotate_query();
    for (int64_t tile = begin; tile < end; ++tile) {
      const int64_t token = c_.sink_tokens + tile * kTileTokens;
      const int64_t left = row_.quantized - tile * kTileTokens;
      const int count = static_cast<int>(std::min<int64_t>(kTileTokens, left));
      const uint64_t held = ~uint64_t{0} >> (kTileTokens - count);
      const auto promoted =
          static_cast<uint64_t>(tiered_.promoted[owner_ * c_.max_pages + tile]) & held;
      if (promoted == held || !visible(row_.start + token, count)) continue;
      attend_tile(tile, token, count, promoted);
    }
    offer_chunk();
  }

  void attend_tile(int64_t tile, int64_t token, int count, uint64_t promoted) {
    const uint8_t *record = record_of(tile), *next = record_after(tile);
    if (held_ == kSelectTiles) offer_chunk();
    logits_ = chunk_.logits + held_ * rows_ * kTileTokens;
    chunk_.token[held_++] = token;
    if (tiered_.fp8) {
      score_fp8(record, next);
    } else {
      score_tile(record, next);
    }
    for (int r = 0; r < rows_; ++r) {
      float* logits = logits_ + r * kTileTokens;
      mask_row(r, row_.start + token, count, logits);
      for (uint64_t bits = promoted; bits; bits &= bits - 1)
        logits[__builtin_ctzll(bits)] = kNegativeInfinity;
    }
    weigh();
    const int groups = kernels_.far->needed_groups(s_.p, rows_, kLeastWeight);
    if (groups != kAllGroups) count_skipped(tiered_.fp8 ? groups : groups ? kAllGroups : 0);
    if (groups == 0) return;
    if (tiered_.fp8) {
      accumulate_int4(record, next, groups);
    } else {
      accumulate_tile(record, next);
    }
  }

  void score_fp8(const uint8_t* record, const uint8_t* next) {
    const FarLayout& f = tiered_.far;
    prefetch(next, f.key_scale, f.key_code);
    prefetch(next, f.value_scale, f.value_code);
    kernels_.far->score_fp8(record + f.key_code, next + f.key_code,
                            reinterpret_cast<const uint16_t*>(record + f.key_scale), f.key_dim,
                            s_.query.data(), rows_, logits_);
  }

  void accumulate_int4(const uint8_t* record, const uint8_t* next, int groups) {
    const FarLayout& f = tiered_.far;
    float offsets[kMaxRows];
    kernels_.far->weigh_middles(s_.p, reinterpret_cast<const uint16_t*>(record + f.value_middle),
                                rows_, offsets);
    kernels_.packed->quantize_weights(s_.p,
                                      reinterpret_cast<const uint16_t*>(record + f.value_scale),
                                      true, rows_, s_.weights, s_.weight_sums, s_.factors);
    kernels_.far->accumulate_int4(record + f.value_code, next + f.value_code, f.value_dim,
                                  s_.weights, s_.weight_sums, s_.factors, offsets, groups, rows_,
                                  s_.acc.data());
  }

  // The best of the chunk join those of every row.
  void offer_chunk() {
    const int tiles = std::exchange(held_, 0);
    logits_ = s_.logits;
    if (tiered_.candidates == 0 || tiles == 0) return;
    int16_t places[kSelectTiles * kTileTokens];
    for (int r = 0; r < rows_; ++r) {
      const float* logits = chunk_.logits + r * kTileTokens;
      const int64_t stride = rows_ * kTileTokens;
      const int count = kernels_.far->select(
          logits, stride, tiles, static_cast<int>(tiered_.candidates), best_[r].least(), places);
      for (int i = 0; i < count; ++i) {
        const int tile = places[i] / kTileTokens, t = places[i] % kTileTokens;
        best_[r].offer(logits[tile * stride + t], static_cast<int32_t>(chunk_.token[tile] + t));
      }
    }
  }

  void count_skipped(int groups) {
    for (int t = 0; t < kTileTokens; ++t) {
      if (groups >> t / kGroupTokens & 1) continue;
      bool attended = false;
      for (int r = 0; r < rows_; ++r)
        attended = attended || logits_[r * kTileTokens + t] != kNegativeInfinity;
      skipped_ += attended;
    }
  }

  void attend_near(int64_t begin, int64_t end, float* near_logits) {
    const int64_t item = size_of(c_.type);
    const auto* key = static_cast<const uint8_t*>(c_.exact_key);
    const auto* value = static_cast<const uint8_t*>(c_.exact_value);
    key += (batch_ * c_.exact_key_stride[0] + head_ * c_.exact_key_stride[1]) * item;
    value += (batch_ * c_.exact_value_stride[0] + head_ * c_.exact_value_stride[1]) * item;
    const int64_t key_step = c_.exact_key_stride[2] * item;
    const int64_t value_step = c_.exact_value_stride[2] * item;
    for (int64_t slot = begin; slot < end; slot += kTileTokens) {
      const int count = static_cast<int>(std::min<int64_t>(kTileTokens, end - slot));
      kernels_.exact->score_exact(key + slot * key_step, c_.type, c_.exact_key_stride[2], count,
                                  f_.key_dim, s_.query.data(), rows_, value + slot * value_step,
                                  value_step, static_cast<int>(f_.value_dim * item), logits_);
      mask_near(tiered_.near_index + owner_ * tiered_.capacity + slot, count);
      for (int r = 0; r < rows_ && tiered_.candidates; ++r)
        std::copy_n(logits_ + r * kTileTokens, count, near_logits + r * slots_ + slot);
      weigh();
      accumulate_near(value + slot * value_step, count);
    }
  }

  // Near tokens lie in any order, so each has its own place in the masks.
  void mask_near(const int32_t* index, int count) {
    int32_t least = index[0], most = index[0];
    for (int t = 1; t < count; ++t) {
      least = std::min(least, index[t]);
      most = std::max(most, index[t]);
    }
    const bool all = least >= 0 && row_.start + least >= s_.begin[rows_ - 1] &&
                     row_.start + most < s_.end[0] && c_.mask_type == MaskType::kNone;
    for (int r = 0; r < rows_; ++r) {
      float* logits = logits_ + r * kTileTokens;
      cap(count, logits);
      for (int t = 0; t < count && !all; ++t) {
        const int64_t position = row_.start + index[t];
        if (index[t] < 0 || position < s_.begin[r] || position >= s_.end[r]) {
          logits[t] = kNegativeInfinity;
        } else if (c_.mask_type != MaskType::kNone) {
          add_mask(r, position, 1, logits + t);
        }
      }
      std::fill(logits + count, logits + kTileTokens, kNegativeInfinity);
    }
  }

  // Runs of needed groups; tokens of weight 0 among them may hold anything.
  void accumulate_near(const uint8_t* value, int count) {
    const int groups = kernels_.far->needed_groups(s_.p, rows_, kLeastWeight);
    const int64_t step = c_.exact_value_stride[2] * size_of(c_.type);
    for (int t = 0; t < count;) {
      int end = t;
      while (end < count && groups >> end / kGroupTokens & 1) end += kGroupTokens;
      end = std::min(end, count);
      if (end > t) add_near(value + t * step, t, end - t);
      t = end > t ? end : t + kGroupTokens;
    }
  }

  void add_near(const uint8_t* value, int first, int count) {
    int zeros = 0;
    for (int r = 0; r < rows_; ++r)
      for (int t = first; t < first + count; ++t) zeros += s_.p[r * kTileTokens + t] == 0.0f;
    kernels_.exact->accumulate_exact(value, c_.type, c_.exact_value_stride[2], count, f_.value_dim,
                                     s_.p + first, rows_, zeros > 0, s_.acc.data());
  }

  const TieredCall& tiered_;
  const int64_t slots_, owner_;
  Chunk& chunk_;
  int held_ = 0;  // tiles in the chunk
  int32_t skipped_ = 0;
  BestTokens best_[kMaxRows];
};

// What the blocks of a head have found, in log weights, becomes what the call returns.
class Findings {
 public:
  Findings(const TieredPlan& plan, int64_t owner) : c_(plan.tiered), plan_(plan), owner_(owner) {}

  void clear() {
    c_.skipped[owner_] = 0;
    if (c_.candidates == 0) return;
    std::fill_n(c_.candidate_index + owner_ * c_.candidates, c_.candidates, -1);
    std::fill_n(c_.candidate_score + owner_ * c_.candidates, c_.candidates, kNegativeInfinity);
    std::fill_n(c_.near_score + owner_ * c_.capacity, c_.capacity, kNegativeInfinity);
  }

  // `partial` are the results of block `block` of the head, whose rows have their log-sum-exp.
  void add(int64_t block, const float* partial, const int32_t* skipped) {
    int32_t& total = c_.skipped[owner_];
    if (block == 0) clear();
    for (int64_t part = 0; part < plan_.splits; ++part) total += skipped[part];
    if (c_.candidates == 0) return;
    const int64_t first = block * kMaxRows;
    const int64_t rows = std::min<int64_t>(kMaxRows, plan_.rows - first);
    const float* logits = partial + plan_.parts * plan_.block_floats;
    for (int64_t r = 0; r < rows; ++r) {
      const float lse = lse_of(first + r);
      for (int64_t part = 0; part < plan_.splits; ++part)
        add_candidates(partial + part * plan_.block_floats + r * plan_.partial_stride +
                           c_.layout.value_dim + 2,
                       lse);
      raise_scores(logits + r * plan_.slots, c_.near_count[owner_], lse,
                   c_.near_score + owner_ * c_.capacity);
    }
  }

 private:
  float lse_of(int64_t row) const {
    const int64_t batch = owner_ / c_.kv_heads;
    const int64_t head = owner_ % c_.kv_heads * plan_.group + row % plan_.group;
    return c_.lse[(batch * c_.heads + head) * c_.queries + row / plan_.group];
  }

  // Scores become log weights where those are greater, which NaN, of masked logits in a row
  // without keys, is not.
  static void raise_scores(const float* logits, int64_t count, float lse, float* scores) {
    for (int64_t i = 0; i < count; ++i) {
      const float weight = logits[i] * kLn2 - lse;
      scores[i] = weight > scores[i] ? weight : scores[i];
    }
  }

  void add_candidates(const float* stored, float lse) {
    int32_t* index = c_.candidate_index + owner_ * c_.candidates;
    float* score = c_.candidate_score + owner_ * c_.candidates;
    for (int64_t i = 0; i < c_.candidates; ++i) {
      int32_t token;
      std::memcpy(&token, stored + c_.candidates + i, sizeof token);
      const float weight = stored[i] * kLn2 - lse;
      if (token < 0 || !(weight > kNegativeInfinity)) continue;
      insert_best(score, index, static_cast<int>(c_.candidates), weight, token);
    }
  }

  const TieredCall& c_;
  const TieredPlan& plan_;
  const int64_t owner_;
};

}  // namespace

void tiered_attention(const Kernels& kernels, const TieredCall& call,
                      const ParallelFor& parallel_for) {
  const TieredPlan plan(call);
  const int64_t items = plan.items();
  if (items == 0) {
    for (int64_t owner = 0; owner < call.batch * call.kv_heads; ++owner)
      Findings(plan, owner).clear();
    return;
  }
  // Long calls take their blocks in rounds, whose memory is used again.
  const int64_t fitting = kWantedFloats / std::max<int64_t>(plan.item_floats, 1);
  const int64_t round = std::min(items, std::max(fitting, kLeastItems));
  static thread_local std::vector<float> kept;
  static thread_local std::vector<int32_t> counts;
  if (kept.size() < static_cast<size_t>(round * plan.item_floats))
    kept.resize(round * plan.item_floats);
  if (counts.size() < static_cast<size_t>(round * plan.parts)) counts.resize(round * plan.parts);
  float* partial = kept.data();
  int32_t* skipped = counts.data();
  for (int64_t first = 0; first < items; first += round) {
    const int64_t last = std::min(first + round, items);
    parallel_for((last - first) * plan.parts, [&](int64_t begin, int64_t end) {
      for (int64_t u = begin; u < end;) {
        const int64_t item = u / plan.parts, next = std::min(end, (item + 1) * plan.parts);
        float* out = partial + item * plan.item_floats;
        float* near_logits = out + plan.parts * plan.block_floats;
        Block block(kernels, plan, first + item);
        for (; u < next; ++u) {
          const int64_t part = u % plan.parts;
          skipped[u] = block.run(part, out + part * plan.block_floats, near_logits);
        }
      }
    });
    const int64_t owners = (last - 1) / plan.blocks - first / plan.blocks + 1;
    parallel_for(owners, [&](int64_t begin, int64_t end) {
      for (int64_t owner = first / plan.blocks + begin; owner < first / plan.blocks + end; ++owner)
        for (int64_t item = std::max(first, owner * plan.blocks);
             item < std::min(last, (owner + 1) * plan.blocks); ++item) {
          const int64_t block = item % plan.blocks, head = owner % call.kv_heads;
          const float* results = partial + (item - first) * plan.item_floats;
          const int64_t rows = std::min<int64_t>(kMaxRows, plan.rows - block * kMaxRows);
          for (int64_t r = 0; r < rows; ++r) {
            const int64_t row = block * kMaxRows + r;
            merge_row(kernels, plan, results + r * plan.partial_stride, plan.block_floats,
                      owner / call.kv_heads, head * plan.group + row % plan.group,
                      row / plan.group);
          }
          Findings(plan, owner).add(block, results, skipped + (item - first) * plan.parts);
        }
    });
  }
}

}  // namespace kvq
