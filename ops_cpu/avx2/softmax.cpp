#if defined(__x86_64__)
#include <immintrin.h>

#include <cstring>

#include "ops_cpu/exp2.h"
#include "ops_cpu/kernels.h"
#include "ops_cpu/region.h"

KVQ_TARGET_BEGIN("avx2,f16c")
#include "ops_cpu/avx2/lanes.h"

namespace kvq::avx2 {
namespace {

void rescale(Softmax* state, float max, float* acc, int dim) {
  const __m256 shrink = _mm256_set1_ps(exp2_nonpositive(state->max - max));
  for (int j = 0; j < 16; j += 8)
    _mm256_storeu_ps(state->lanes + j, _mm256_mul_ps(_mm256_loadu_ps(state->lanes + j), shrink));
  for (int d = 0; d < dim; d += 8)
    _mm256_storeu_ps(acc + d, _mm256_mul_ps(_mm256_loadu_ps(acc + d), shrink));
  state->max = max;
}

inline void softmax_row(const float* scores, Softmax* state, float* acc, int dim, float* p) {
  __m256 max8 = _mm256_loadu_ps(scores);
  for (int t = 8; t < kTileTokens; t += 8) max8 = _mm256_max_ps(_mm256_loadu_ps(scores + t), max8);
  const float max = largest(max8);
  if (max == -__builtin_inff()) {
    std::memset(p, 0, sizeof(float) * kTileTokens);
    return;
  }
  if (max > state->max) rescale(state, max, acc, dim);
  const __m256 most = _mm256_set1_ps(state->max);
  __m256 w[8];
  for (int i = 0; i < 8; ++i) {
    w[i] = exp2_nonpositive8(_mm256_sub_ps(_mm256_loadu_ps(scores + 8 * i), most));
    _mm256_storeu_ps(p + 8 * i, w[i]);
  }
  for (int j = 0; j < 2; ++j) {
    const __m256 sum =
        _mm256_add_ps(_mm256_add_ps(w[j], w[2 + j]), _mm256_add_ps(w[4 + j], w[6 + j]));
    float* lanes = state->lanes + 8 * j;
    _mm256_storeu_ps(lanes, _mm256_add_ps(_mm256_loadu_ps(lanes), sum));
  }
}

void softmax_rows(const float* scores, Softmax* states, float* acc, int dim, int rows, float* p) {
  for (int r = 0; r < rows; ++r)
    softmax_row(scores + r * kTileTokens, states + r, acc + r * dim, dim, p + r * kTileTokens);
}

}  // namespace

const SoftmaxKernels softmax{softmax_rows};

}  // namespace kvq::avx2
KVQ_TARGET_END
#endif
