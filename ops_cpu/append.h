// Appending tokens to a layer: what moves where, and which tiles are due.
#pragma once
#include <cstdint>
#include <functional>

#include "ops_cpu/kernels.h"

namespace kvq {

// Runs body(begin, end) over a partition of [0, count).
using ParallelFor =
    std::function<void(int64_t count, const std::function<void(int64_t, int64_t)>& body)>;

// New keys or values [batch, kv_heads, tokens, dim]; strides in elements, channels contiguous.
struct NewTokens {
  const void* data;
  int64_t stride[3];
};

// The state of docs/formats.md, "State of a layer"; every tensor is contiguous.
struct LayerState {
  Layout layout;
  Float type;
  int64_t batch, kv_heads, pages, max_pages, capacity, sink_tokens;
  uint8_t* tiles;
  const int32_t* block_table;
  float* balance;
  void* exact_key;
  void* exact_value;
  int32_t* lengths;
};

struct AppendRule {
  int64_t residual_length, quantized_start;
};

// Throws std::out_of_range when the state does not hold together or has no room for `tokens` more.
void check_append(const LayerState& state, int64_t tokens, const AppendRule& rule);

void append(const Kernels& kernels, const LayerState& state, const NewTokens& key,
            const NewTokens& value, int64_t tokens, const AppendRule& rule,
            const ParallelFor& parallel_for);

}  // namespace kvq
