#include "ops_cpu/kernels.h"
#include "ops_cpu/scalar/lanes.h"

namespace kvq::scalar {
namespace {

void score_exact(const void* keys, Float type, int64_t stride, int tokens, int dim,
                 const float* query, int rows, const uint8_t*, int64_t, int, float* scores) {
  float key[kMaxHeadDim];
  for (int t = 0; t < tokens; ++t) {
    transform.load(static_cast<const uint8_t*>(keys) + t * stride * size_of(type), type, key, dim);
    for (int r = 0; r < rows; ++r) {
      const float* q = query + r * dim;
      scores[r * kTileTokens + t] = dot(q, key, dim);
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

const ExactAttentionKernels exact_attention{score_exact, accumulate_exact};

}  // namespace kvq::scalar
