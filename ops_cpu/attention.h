// Attention of any number of queries over a packed layer: which rows, tiles and masks meet.
#pragma once
#include <cstdint>

#include "ops_cpu/append.h"
#include "ops_cpu/kernels.h"

namespace kvq {

enum class MaskType : int32_t { kNone, kBool, kFloat32, kFloat16, kBFloat16 };

struct AttentionCall {
  Layout layout;
  Float type;        // of the exact keys and values
  Float query_type;  // of query and out
  int64_t batch, heads, kv_heads, queries;
  int64_t max_pages, sink_tokens;

  const void* query;  // [batch, heads, queries, key_dim]
  int64_t query_stride[3];
  const uint8_t* tiles;
  int64_t tiles_stride[2];
  const int32_t* block_table;  // [batch, max_pages]
  const float* balance;        // [batch, kv_heads, key_dim]
  const void* exact_key;
  int64_t exact_key_stride[3];
  const void* exact_value;
  int64_t exact_value_stride[3];
  const int32_t* lengths;  // [batch, 3]

  const void* mask;  // [batch, heads, queries, positions], last stride 1
  MaskType mask_type;
  int64_t mask_stride[3];
  const void* sinks;  // [heads] or null
  Float sinks_type;

  float scale;
  bool is_causal;
  int64_t sliding_window;  // 0: none
  float softcap;           // 0: none
  bool exact;

  void* out;   // [batch, heads, queries, value_dim], contiguous
  float* lse;  // [batch, heads, queries]
};

// Throws std::out_of_range when lengths or pages point outside the buffers.
void check_lengths(const int32_t* lengths, const int32_t* block_table, int64_t batch,
                   int64_t max_pages, int64_t pages, int64_t capacity, int64_t sink_tokens);

void attention(const Kernels& kernels, const AttentionCall& call, const ParallelFor& parallel_for);

}  // namespace kvq
