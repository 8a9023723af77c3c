#include <cmath>

#include "ops_cpu/half.h"
#include "ops_cpu/kernels.h"
#include "ops_cpu/packing.h"
#include "ops_cpu/scalar/lanes.h"

namespace kvq::scalar {
namespace {

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
    means[r] = dot(q, mean, dim) * mean_scale;
  }
}

void scale_scores(const int32_t* scores, const uint16_t* key_scales, const float* units,
                  const float* means, int rows, float* out) {
  for (int i = 0; i < rows * kTileTokens; ++i) {
    const int r = i / kTileTokens, t = i % kTileTokens;
    out[i] = static_cast<float>(scores[i]) * (half_to_float(key_scales[t]) * units[r]) + means[r];
  }
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

}  // namespace

const PackedAttentionKernels packed_attention{quantize_query, score_tile,       score_mean,
                                              scale_scores,   quantize_weights, accumulate_tile};

}  // namespace kvq::scalar
