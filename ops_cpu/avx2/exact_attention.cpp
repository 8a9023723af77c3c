#if defined(__x86_64__)
#include <immintrin.h>

#include "ops_cpu/exp2.h"
#include "ops_cpu/kernels.h"
#include "ops_cpu/region.h"

KVQ_TARGET_BEGIN("avx2,f16c")
#include "ops_cpu/avx2/lanes.h"

namespace kvq::avx2 {
namespace {

// Lane sums of four tokens with one query row, as four scores.
inline __m128 fold4(const __m256* lo, const __m256* hi) {
  __m256 eight[4];
  for (int i = 0; i < 4; ++i) eight[i] = _mm256_add_ps(lo[i], hi[i]);
  __m256 four[2];
  for (int i = 0; i < 2; ++i) {
    const __m256 a = eight[2 * i], b = eight[2 * i + 1];
    four[i] = _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
  }
  // four[0] holds tokens 0 | 1 and four[1] tokens 2 | 3, four lanes each.
  const __m256 two = _mm256_add_ps(_mm256_shuffle_ps(four[0], four[1], 0x44),
                                   _mm256_shuffle_ps(four[0], four[1], 0xEE));
  const __m256 one = _mm256_add_ps(two, _mm256_permute_ps(two, 0xB1));
  const __m128 even = _mm256_castps256_ps128(one), odd = _mm256_extractf128_ps(one, 1);
  return _mm_unpacklo_ps(_mm_shuffle_ps(even, even, 0x08), _mm_shuffle_ps(odd, odd, 0x08));
}

// Scores of four tokens, whose keys stay in the first cache, with every row. Those that are not
// float32 are converted once for all rows.
template <Float kType>
void score_exact_as(const void* keys, int64_t stride, int tokens, int dim, const float* query,
                    int rows, const uint8_t* values, int64_t value_step, int value_bytes,
                    float* scores) {
  constexpr int kTokens = 4;
  alignas(32) float converted[kType == Float::kFloat32 ? 1 : kTokens * kMaxHeadDim];
  for (int t = 0; t < tokens; t += kTokens) {
    const float* key[kTokens];
    for (int i = 0; i < kTokens; ++i) {
      const int token = t + i < tokens ? t + i : tokens - 1;
      const auto* k = static_cast<const uint8_t*>(keys) + token * stride * size_of(kType);
      for (int b = 0; b < value_bytes; b += 64) prefetch(values + token * value_step + b);
      if constexpr (kType == Float::kFloat32) {
        key[i] = reinterpret_cast<const float*>(k);
      } else {
        key[i] = converted + i * dim;
        for (int d = 0; d < dim; d += 8)
          _mm256_store_ps(converted + i * dim + d, load8(k, kType, d));
      }
    }
    for (int r = 0; r < rows; ++r) {
      const float* q = query + r * dim;
      __m256 lo[kTokens], hi[kTokens];
      for (int i = 0; i < kTokens; ++i) lo[i] = hi[i] = _mm256_setzero_ps();
      for (int d = 0; d < dim; d += 16) {
        const __m256 a = _mm256_loadu_ps(q + d), b = _mm256_loadu_ps(q + d + 8);
        for (int i = 0; i < kTokens; ++i) {
          lo[i] = _mm256_add_ps(lo[i], _mm256_mul_ps(a, _mm256_loadu_ps(key[i] + d)));
          hi[i] = _mm256_add_ps(hi[i], _mm256_mul_ps(b, _mm256_loadu_ps(key[i] + d + 8)));
        }
      }
      _mm_storeu_ps(scores + r * kTileTokens + t, fold4(lo, hi));
    }
  }
}

void score_exact(const void* keys, Float type, int64_t stride, int tokens, int dim,
                 const float* query, int rows, const uint8_t* values, int64_t value_step,
                 int value_bytes, float* scores) {
  const auto score = type == Float::kFloat32   ? score_exact_as<Float::kFloat32>
                     : type == Float::kFloat16 ? score_exact_as<Float::kFloat16>
                                               : score_exact_as<Float::kBFloat16>;
  score(keys, stride, tokens, dim, query, rows, values, value_step, value_bytes, scores);
}

// Sixteen channels of up to four rows stay in registers over all tokens.
template <Float kType, int kRows>
void accumulate_exact_rows(const uint8_t* values, int64_t step, int tokens, int dim, const float* p,
                           float* acc) {
  for (int d = 0; d < dim; d += 16) {
    __m256 a[kRows][2];
    for (int r = 0; r < kRows; ++r)
      for (int i = 0; i < 2; ++i) a[r][i] = _mm256_loadu_ps(acc + r * dim + d + 8 * i);
    for (int t = 0; t < tokens; ++t) {
      const __m256 v[2] = {load8(values + t * step, kType, d),
                           load8(values + t * step, kType, d + 8)};
      for (int r = 0; r < kRows; ++r) {
        const __m256 w = _mm256_set1_ps(p[r * kTileTokens + t]);
        for (int i = 0; i < 2; ++i) a[r][i] = _mm256_add_ps(a[r][i], _mm256_mul_ps(w, v[i]));
      }
    }
    for (int r = 0; r < kRows; ++r)
      for (int i = 0; i < 2; ++i) _mm256_storeu_ps(acc + r * dim + d + 8 * i, a[r][i]);
  }
}

template <Float kType>
void accumulate_exact_as(const uint8_t* values, int64_t stride, int tokens, int dim, const float* p,
                         int rows, bool skip_zero, float* acc) {
  const int64_t step = stride * size_of(kType);
  if (skip_zero) {
    for (int r = 0; r < rows; ++r)
      for (int t = 0; t < tokens; ++t)
        if (p[r * kTileTokens + t] != 0.0f)
          accumulate_exact_rows<kType, 1>(values + t * step, step, 1, dim, p + r * kTileTokens + t,
                                          acc + r * dim);
    return;
  }
  for (int r = 0; r < rows; r += 4) {
    const auto add = rows - r == 1   ? accumulate_exact_rows<kType, 1>
                     : rows - r == 2 ? accumulate_exact_rows<kType, 2>
                     : rows - r == 3 ? accumulate_exact_rows<kType, 3>
                                     : accumulate_exact_rows<kType, 4>;
    add(values, step, tokens, dim, p + r * kTileTokens, acc + r * dim);
  }
}

void accumulate_exact(const void* values, Float type, int64_t stride, int tokens, int dim,
                      const float* p, int rows, bool skip_zero, float* acc) {
  const auto add = type == Float::kFloat32   ? accumulate_exact_as<Float::kFloat32>
                   : type == Float::kFloat16 ? accumulate_exact_as<Float::kFloat16>
                                             : accumulate_exact_as<Float::kBFloat16>;
  add(static_cast<const uint8_t*>(values), stride, tokens, dim, p, rows, skip_zero, acc);
}

}  // namespace

const ExactAttentionKernels exact_attention{score_exact, accumulate_exact};

}  // namespace kvq::avx2
KVQ_TARGET_END
#endif
