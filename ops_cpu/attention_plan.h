// How one attention call is cut into units of work.
#pragma once
#include <cstdint>

#include "ops_cpu/attention.h"

namespace kvq {

struct Row {  // one sequence
  int64_t start, length, tokens, quantized, tiles;
};
Row read_row(const int32_t* lengths, int64_t batch);

// The first tile that a query of the call may see.
int64_t first_tile(const AttentionCall& call, const Row& row);

// A block of query rows of one KV head, in the order (query, head of the group), and its partial
// results: per part and row value_dim sums, then maximum and denominator. The first parts are
// splits of the tiles, the others exact tokens; the sums of the first `rotated` parts are rotated.
struct Plan {
  explicit Plan(const AttentionCall& call);

  const AttentionCall& c;
  int64_t group, rows, blocks, splits, rotated, parts;
  int64_t partial_stride;

  // Parts to make of `count` pieces, at least `least` in each; the threads do not matter.
  int64_t share(int64_t count, int64_t least) const;
  int64_t items() const { return c.batch * c.kv_heads * blocks; }
};

// The partial results of one query row become its output and log-sum-exp.
void merge_row(const Kernels& kernels, const Plan& plan, const float* partial, int64_t part_stride,
               int64_t batch, int64_t head, int64_t query);

}  // namespace kvq
