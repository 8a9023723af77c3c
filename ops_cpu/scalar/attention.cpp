#include <cmath>
#include <cstring>
#include <limits>

#include "ops_cpu/exp2.h"
#include "ops_cpu/half.h"
#include "ops_cpu/kernels.h"
#include "ops_cpu/packing.h"

namespace kvq::scalar {
namespace {

constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();

float fold(float* lane) {
  for (int half = 8; half >= 1; half /= 2)
    for (int j = 0; j < half; ++j) lane[j] = lane[j] + lane[j + half];
  return lane[0];
}

// Integer i of a row written by quantize_query or quantize_weights.
int integer_at(const void* row, bool exact, int i) {
  return exact ? static_cast<const int16_t*>(row)[i] : static_cast<const int8_t*>(row)[i];
}

void store_integer(void* row, bool exact, int i, int value) {
  if (exact) {
    static_cast<int16_t*>(row)[i] = static_cast<int16_t>(value);
  } else {
    static_cast<int8_t*>(row)[i] = static_cast<int8_t>(value);
  }
}

void quantize_query(const float* x, int dim, bool exact, void* out, int32_t* sum, float* unit) {
  float largest = 0.0f;
  for (int d = 0; d < dim; ++d) largest = std::fabs(x[d]) > largest ? std::fabs(x[d]) : largest;
  const float limit = exact ? kQueryLimitExact : kQueryLimitFast;
  const float inverse = largest > kSmallestMagnitude ? limit / largest : 0.0f;
  *unit = largest / limit;
  *sum = 0;
  for (int d = 0; d < dim; ++d) {
    const int v = static_cast<int>(std::nearbyint(x[d] * inverse));
    store_integer(out, exact, d, v);
    *sum += v;
  }
}

void decode_levels(const uint8_t* codes, int count, int bits, int8_t* levels) {
  const Codebook& book = codebook(bits);
  for (int i = 0; i < count; ++i) levels[i] = book.level[codes[i]];
}

// Codes and levels of one tile.
struct Decoded {
  uint8_t codes[kTileTokens * kMaxHeadDim];
  int8_t levels[kTileTokens * kMaxHeadDim];
};

Decoded& decoded() {
  static thread_local Decoded instance;
  return instance;
}

void score_tile(const uint8_t* packed, const uint8_t*, int dim, int bits, const void* query,
                bool exact, const int32_t*, int rows, int32_t* scores) {
  Decoded& d = decoded();
  unpack_keys(packed, dim, bits, d.codes);
  decode_levels(d.codes, kTileTokens * dim, bits, d.levels);
  for (int r = 0; r < rows; ++r) {
    const void* q = static_cast<const uint8_t*>(query) + r * dim * integer_bytes(exact);
    for (int t = 0; t < kTileTokens; ++t) {
      int32_t sum = 0;
      for (int c = 0; c < dim; ++c) sum += integer_at(q, exact, c) * d.levels[t * dim + c];
      scores[r * kTileTokens + t] = sum;
    }
  }
}

void score_mean(const float* query, const int8_t* mean, float mean_scale, int dim, int rows,
                float* means) {
  for (int r = 0; r < rows; ++r) {
    const float* q = query + r * dim;
    float lane[16];
    for (int j = 0; j < 16; ++j) lane[j] = q[j] * static_cast<float>(mean[j]);
    for (int i = 16; i < dim; i += 16)
      for (int j = 0; j < 16; ++j) lane[j] = lane[j] + q[i + j] * static_cast<float>(mean[i + j]);
    means[r] = fold(lane) * mean_scale;
  }
}

void scale_scores(const int32_t* scores, const uint16_t* key_scales, const float* units,
                  const float* means, int rows, float* out) {
  for (int i = 0; i < rows * kTileTokens; ++i) {
    const int r = i / kTileTokens, t = i % kTileTokens;
    out[i] = static_cast<float>(scores[i]) * (half_to_float(key_scales[t]) * units[r]) + means[r];
  }
}

void softmax_row(const float* scores, Softmax* state, float* acc, int dim, float* p) {
  float max = kNegativeInfinity;
  for (int t = 0; t < kTileTokens; ++t) max = scores[t] > max ? scores[t] : max;
  if (max == kNegativeInfinity) {
    for (int t = 0; t < kTileTokens; ++t) p[t] = 0.0f;
    return;
  }
  if (max > state->max) {
    const float shrink = exp2_nonpositive(state->max - max);
    for (int j = 0; j < 16; ++j) state->lanes[j] = state->lanes[j] * shrink;
    for (int d = 0; d < dim; ++d) acc[d] = acc[d] * shrink;
    state->max = max;
  }
  for (int t = 0; t < kTileTokens; ++t) p[t] = exp2_nonpositive(scores[t] - state->max);
  for (int j = 0; j < 16; ++j)
    state->lanes[j] = state->lanes[j] + ((p[j] + p[16 + j]) + (p[32 + j] + p[48 + j]));
}

void softmax(const float* scores, Softmax* states, float* acc, int dim, int rows, float* p) {
  for (int r = 0; r < rows; ++r)
    softmax_row(scores + r * kTileTokens, states + r, acc + r * dim, dim, p + r * kTileTokens);
}

float quantize_row(const float* p, const uint16_t* value_scales, bool exact, void* out,
                   int32_t* sum) {
  float u[kTileTokens], largest = 0.0f;
  for (int t = 0; t < kTileTokens; ++t) {
    u[t] = p[t] > 0.0f ? p[t] * half_to_float(value_scales[t]) : 0.0f;
    largest = u[t] > largest ? u[t] : largest;
  }
  const float limit = exact ? kWeightLimitExact : kWeightLimitFast;
  const bool any = largest > kSmallestMagnitude;
  const float inverse = any ? limit / largest : 0.0f;
  *sum = 0;
  for (int t = 0; t < kTileTokens; ++t) {
    const int w = static_cast<int>(std::nearbyint(u[t] * inverse));
    store_integer(out, exact, t, w);
    *sum += w;
  }
  return any ? largest / limit : 0.0f;
}

void quantize_weights(const float* p, const uint16_t* value_scales, bool exact, int rows, void* out,
                      int32_t* sums, float* units) {
  for (int r = 0; r < rows; ++r)
    units[r] =
        quantize_row(p + r * kTileTokens, value_scales, exact,
                     static_cast<uint8_t*>(out) + r * kTileTokens * integer_bytes(exact), &sums[r]);
}

void accumulate_tile(const uint8_t* packed, const uint8_t*, int dim, int bits, const void* weights,
                     bool exact, const int32_t*, const float* units, int rows, float* acc) {
  Decoded& d = decoded();
  unpack_values(packed, dim, bits, d.codes);
  decode_levels(d.codes, kTileTokens * dim, bits, d.levels);
  for (int r = 0; r < rows; ++r) {
    const void* row = static_cast<const uint8_t*>(weights) + r * kTileTokens * integer_bytes(exact);
    int32_t sums[kMaxHeadDim] = {};
    for (int t = 0; t < kTileTokens; ++t) {
      const int w = integer_at(row, exact, t);
      for (int c = 0; c < dim; ++c) sums[c] += w * d.levels[t * dim + c];
    }
    for (int c = 0; c < dim; ++c)
      acc[r * dim + c] = acc[r * dim + c] + static_cast<float>(sums[c]) * units[r];
  }
}

void score_exact(const void* keys, Float type, int64_t stride, int tokens, int dim,
                 const float* query, int rows, const uint8_t*, int64_t, int, float* scores) {
  float key[kMaxHeadDim];
  for (int t = 0; t < tokens; ++t) {
    transform.load(static_cast<const uint8_t*>(keys) + t * stride * size_of(type), type, key, dim);
    for (int r = 0; r < rows; ++r) {
      const float* q = query + r * dim;
      float lane[16];
      for (int j = 0; j < 16; ++j) lane[j] = q[j] * key[j];
      for (int i = 16; i < dim; i += 16)
        for (int j = 0; j < 16; ++j) lane[j] = lane[j] + q[i + j] * key[i + j];
      scores[r * kTileTokens + t] = fold(lane);
    }
  }
}

void accumulate_exact(const void* values, Float type, int64_t stride, int tokens, int dim,
                      const float* p, int rows, bool, float* acc) {
  float value[kMaxHeadDim];
  for (int t = 0; t < tokens; ++t) {
    transform.load(static_cast<const uint8_t*>(values) + t * stride * size_of(type), type, value,
                   dim);
    for (int r = 0; r < rows; ++r) {
      const float weight = p[r * kTileTokens + t];
      if (weight == 0.0f) continue;
      for (int d = 0; d < dim; ++d) acc[r * dim + d] = acc[r * dim + d] + weight * value[d];
    }
  }
}

}  // namespace

const AttentionKernels attention{
    quantize_query,   score_tile,      score_mean,  scale_scores,     softmax,
    quantize_weights, accumulate_tile, score_exact, accumulate_exact,
};

}  // namespace kvq::scalar
