// One block of query rows of one KV head, attended to one part of the tokens after the other.
#pragma once
#include <cstdint>
#include <vector>

#include "ops_cpu/attention_plan.h"

namespace kvq {

// Scratch of one thread; reused over its units and calls.
struct Scratch {
  std::vector<float> query, rotated, acc;
  std::vector<uint8_t> integers;  // of the queries
  alignas(64) int32_t scores[kMaxRows * kTileTokens];
  alignas(64) float logits[kMaxRows * kTileTokens];
  alignas(64) float p[kMaxRows * kTileTokens];
  alignas(64) uint8_t weights[kMaxRows * kTileTokens * integer_bytes(true)];
  int32_t sums[kMaxRows], weight_sums[kMaxRows];
  float units[kMaxRows], means[kMaxRows], factors[kMaxRows];
  int64_t begin[kMaxRows], end[kMaxRows];  // positions that the causal mask and the window leave
  Softmax softmax[kMaxRows];

  void prepare(int key_dim, int value_dim);
};

Scratch& scratch();

class QueryBlock {
 public:
  QueryBlock(const Kernels& kernels, const Plan& plan, int64_t item);

 protected:
  // Tiles between one that is attended to and the one that is prefetched meanwhile.
  static constexpr int64_t kAhead = 2;

  int64_t query_of(int r) const { return (first_ + r) / plan_.group; }
  int64_t head_of(int r) const { return head_ * plan_.group + (first_ + r) % plan_.group; }

  // Forgets the part before.
  void begin_part();

  // The queries as the packed kernels take them, before the first tile.
  void rotate_query();

  const uint8_t* record_of(int64_t tile) const;
  // The record to prefetch while `tile` is attended to.
  const uint8_t* record_after(int64_t tile) const;
  static void prefetch(const uint8_t* record, int64_t begin, int64_t end);

  // Logits of a packed tile, and its values added by the weights of the softmax.
  void score_tile(const uint8_t* record, const uint8_t* next);
  void accumulate_tile(const uint8_t* record, const uint8_t* next);

  // The softmax of the logits.
  void weigh();

  bool visible(int64_t position, int count) const;
  // Softcap, masks and the end of the tile; masked logits become -inf whatever they held.
  void mask_row(int r, int64_t position, int count, float* logits) const;
  void cap(int count, float* logits) const;
  void add_mask(int r, int64_t position, int count, float* logits) const;

  // Sums, maximum and denominator of every row.
  void store(float* partial) const;

  const Kernels& kernels_;
  const Plan& plan_;
  const AttentionCall& c_;
  const Layout& f_;
  Scratch& s_;
  float* logits_;  // [rows, 64] of the tile at hand
  Row row_;
  int64_t batch_, head_, first_;
  int rows_;
  bool rotated_ = false;

 private:
  void load_query();
};

}  // namespace kvq
