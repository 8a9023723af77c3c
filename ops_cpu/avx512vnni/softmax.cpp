#if defined(__x86_64__)
#include <immintrin.h>

#include <cstring>

#include "ops_cpu/exp2.h"
#include "ops_cpu/kernels.h"
#include "ops_cpu/region.h"

KVQ_TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512vbmi,avx2,f16c")
#include "ops_cpu/avx512vnni/lanes.h"

namespace kvq::avx512vnni {
namespace {

void rescale(Softmax* state, float max, float* acc, int dim) {
  const __m512 shrink = _mm512_set1_ps(exp2_nonpositive(state->max - max));
  _mm512_storeu_ps(state->lanes, _mm512_mul_ps(_mm512_loadu_ps(state->lanes), shrink));
  for (int d = 0; d < dim; d += 16)
    _mm512_storeu_ps(acc + d, _mm512_mul_ps(_mm512_loadu_ps(acc + d), shrink));
  state->max = max;
}

inline void softmax_row(const float* scores, Softmax* state, float* acc, int dim, float* p) {
  __m512 s[4], max16 = _mm512_set1_ps(-__builtin_inff());
  for (int i = 0; i < 4; ++i) {
    s[i] = _mm512_loadu_ps(scores + 16 * i);
    max16 = _mm512_max_ps(s[i], max16);
  }
  const float max = _mm512_reduce_max_ps(max16);
  if (max == -__builtin_inff()) {
    std::memset(p, 0, sizeof(float) * kTileTokens);
    return;
  }
  if (max > state->max) rescale(state, max, acc, dim);
  const __m512 most = _mm512_set1_ps(state->max);
  for (int i = 0; i < 4; ++i) {
    s[i] = exp2_nonpositive16(_mm512_sub_ps(s[i], most));
    _mm512_storeu_ps(p + 16 * i, s[i]);
  }
  const __m512 sum = _mm512_add_ps(_mm512_add_ps(s[0], s[1]), _mm512_add_ps(s[2], s[3]));
  _mm512_storeu_ps(state->lanes, _mm512_add_ps(_mm512_loadu_ps(state->lanes), sum));
}

void softmax_rows(const float* scores, Softmax* states, float* acc, int dim, int rows, float* p) {
  for (int r = 0; r < rows; ++r)
    softmax_row(scores + r * kTileTokens, states + r, acc + r * dim, dim, p + r * kTileTokens);
}

}  // namespace

const SoftmaxKernels softmax{softmax_rows};

}  // namespace kvq::avx512vnni
KVQ_TARGET_END
#endif
