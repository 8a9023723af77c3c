#include <cmath>

#include "ops_cpu/e4m3.h"
#include "ops_cpu/far.h"
#include "ops_cpu/kernels.h"
#include "ops_cpu/packing.h"
#include "ops_cpu/scalar/lanes.h"

namespace kvq::scalar {
namespace {

void score_fp8(const uint8_t* codes, const uint8_t*, const uint16_t* key_scales, int dim,
               const float* query, int rows, float* scores) {
  float key[kMaxHeadDim];
  for (int t = 0; t < kTileTokens; ++t) {
    for (int c = 0; c < dim; ++c) key[c] = e4m3_to_float(codes[fp8_place(t, c, dim)]);
    const float scale = half_to_float(key_scales[t]);
    for (int r = 0; r < rows; ++r) {
      const float* q = query + r * dim;
      float sum[4] = {};
      for (int c = 0; c < dim; ++c) sum[c & 3] = std::fma(q[c], key[c], sum[c & 3]);
      scores[r * kTileTokens + t] = ((sum[0] + sum[1]) + (sum[2] + sum[3])) * scale;
    }
  }
}

void weigh_middles(const float* p, const uint16_t* middles, int rows, float* offsets) {
  for (int r = 0; r < rows; ++r) {
    float lane[16], x[kTileTokens];
    for (int t = 0; t < kTileTokens; ++t) {
      const float w = p[r * kTileTokens + t];
      x[t] = w == 0.0f ? 0.0f : w * half_to_float(middles[t]);
    }
    for (int j = 0; j < 16; ++j) lane[j] = (x[j] + x[16 + j]) + (x[32 + j] + x[48 + j]);
    offsets[r] = fold(lane);
  }
}

void accumulate_int4(const uint8_t* packed, const uint8_t*, int dim, const void* weights,
                     const int32_t*, const float* units, const float* offsets, int groups, int rows,
                     float* acc) {
  static thread_local uint8_t codes[kTileTokens * kMaxHeadDim];
  unpack_values(packed, dim, 4, codes);
  for (int r = 0; r < rows; ++r) {
    const auto* w = static_cast<const int16_t*>(weights) + r * kTileTokens;
    int32_t sums[kMaxHeadDim] = {};
    for (int t = 0; t < kTileTokens; ++t) {
      if (!(groups >> t / kGroupTokens & 1)) continue;
      for (int c = 0; c < dim; ++c) sums[c] += w[t] * (2 * codes[t * dim + c] - kFarValueSteps);
    }
    for (int c = 0; c < dim; ++c)
      acc[r * dim + c] = acc[r * dim + c] + (static_cast<float>(sums[c]) * units[r] + offsets[r]);
  }
}

int needed_groups(float* p, int rows, float bound) {
  int groups = 0;
  for (int r = 0; r < rows; ++r)
    for (int t = 0; t < kTileTokens; ++t)
      if (!(p[r * kTileTokens + t] < bound)) groups |= 1 << t / kGroupTokens;
  for (int r = 0; r < rows; ++r)
    for (int t = 0; t < kTileTokens; ++t)
      if (!(groups >> t / kGroupTokens & 1)) p[r * kTileTokens + t] = 0.0f;
  return groups;
}

int select(const float* scores, int64_t stride, int tiles, int, float floor, int16_t* places) {
  int count = 0;
  for (int tile = 0; tile < tiles; ++tile)
    for (int t = 0; t < kTileTokens; ++t)
      if (scores[tile * stride + t] > floor)
        places[count++] = static_cast<int16_t>(kTileTokens * tile + t);
  return count;
}

}  // namespace

const FarAttentionKernels far_attention{score_fp8, weigh_middles, accumulate_int4, needed_groups,
                                        select};

}  // namespace kvq::scalar
