// Attention over near tokens, exact and in any order, and far tiles without their promoted tokens.
#pragma once
#include <cstdint>

#include "ops_cpu/attention.h"
#include "ops_cpu/far.h"

namespace kvq {

constexpr int kMaxCandidates = 64;

// The exact keys and values of the call are the near ones; docs/formats.md has the rest.
struct TieredCall : AttentionCall {
  bool fp8;                   // fp8 keys and int4 values, else 4-bit tiles
  FarLayout far;              // of the former
  int64_t capacity;           // near slots
  const int32_t* near_index;  // [batch, kv_heads, capacity]
  const int32_t* near_count;  // [batch, kv_heads]
  const int64_t* promoted;    // [batch, kv_heads, max_pages]
  int64_t candidates;

  int32_t* candidate_index;  // [batch, kv_heads, candidates]
  float* candidate_score;
  float* near_score;  // [batch, kv_heads, capacity], not written without candidates
  int32_t* skipped;   // [batch, kv_heads]
};

// Throws std::out_of_range when counts or near tokens are outside their buffers, and
// std::invalid_argument when a token would count twice or a promoted one is not near.
void check_near(const TieredCall& call);

void tiered_attention(const Kernels& kernels, const TieredCall& call,
                      const ParallelFor& parallel_for);

}  // namespace kvq
