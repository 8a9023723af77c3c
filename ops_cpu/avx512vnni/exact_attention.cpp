#if defined(__x86_64__)
#include <immintrin.h>

#include <algorithm>

#include "ops_cpu/exp2.h"
#include "ops_cpu/kernels.h"
#include "ops_cpu/region.h"

KVQ_TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512vbmi,avx2,f16c")
#include "ops_cpu/avx512vnni/lanes.h"

namespace kvq::avx512vnni {
namespace {

// How far in front of a key others are prefetched; those behind the last begin the next call's.
constexpr int64_t kBytesAhead = 2048;

inline void prefetch_token(const uint8_t* p, int64_t bytes) {
  for (int64_t b = 0; b < bytes; b += 64) prefetch(p + b);
}

// Scores of four tokens with some rows: each register of keys is converted once for all of them.
template <Float kType, int kRows>
void score_four(const uint8_t* const* key, int dim, const float* query, float* scores) {
  constexpr int kTokens = 4;
  __m512 sum[kRows][kTokens];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) sum[r][j] = _mm512_setzero_ps();
  for (int d = 0; d < dim; d += 16) {
    __m512 k[kTokens];
    for (int i = 0; i < kTokens; ++i) k[i] = load16(key[i], kType, d);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const __m512 q = _mm512_loadu_ps(query + r * dim + d);
      for (int i = 0; i < kTokens; ++i)
        sum[r][i] = _mm512_add_ps(sum[r][i], _mm512_mul_ps(q, k[i]));
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) _mm_storeu_ps(scores + r * kTileTokens, fold4(sum[r]));
}

// Scores of four tokens, whose keys stay in the first cache, with every row.
template <Float kType>
void score_exact_as(const void* keys, int64_t stride, int tokens, int dim, const float* query,
                    int rows, const uint8_t* values, int64_t value_step, int value_bytes,
                    float* scores) {
  constexpr int kTokens = 4;
  const auto* first = static_cast<const uint8_t*>(keys);
  const int64_t key_step = stride * size_of(kType), key_bytes = dim * size_of(kType);
  const int ahead = static_cast<int>(std::max<int64_t>(kBytesAhead / key_bytes, kTokens));
  for (int t = 0; t < tokens; t += kTokens) {
    for (int i = t; i < t + kTokens && i < tokens; ++i) {
      prefetch_token(first + (i + ahead) * key_step, key_bytes);
      prefetch_token(values + i * value_step, value_bytes);
    }
    const uint8_t* key[kTokens];
    for (int i = 0; i < kTokens; ++i)
      key[i] = first + (t + i < tokens ? t + i : tokens - 1) * key_step;
    for (int r = 0; r < rows; r += 4) {
      const auto score = rows - r == 1   ? score_four<kType, 1>
                         : rows - r == 2 ? score_four<kType, 2>
                         : rows - r == 3 ? score_four<kType, 3>
                                         : score_four<kType, 4>;
      score(key, dim, query + r * dim, scores + r * kTileTokens + t);
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

// kVectors times 16 channels of up to four rows stay in registers over all tokens.
template <Float kType, int kRows, int kVectors>
void accumulate_exact_rows(const uint8_t* values, int64_t step, int tokens, int first, int dim,
                           const float* p, float* acc) {
  __m512 a[kRows][kVectors];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) a[r][i] = _mm512_loadu_ps(acc + r * dim + first + 16 * i);
  for (int t = 0; t < tokens; ++t) {
    __m512 v[kVectors];
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) v[i] = load16(values + t * step, kType, first + 16 * i);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const __m512 w = _mm512_set1_ps(p[r * kTileTokens + t]);
#pragma GCC unroll 4
      for (int i = 0; i < kVectors; ++i) a[r][i] = _mm512_add_ps(a[r][i], _mm512_mul_ps(w, v[i]));
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) _mm512_storeu_ps(acc + r * dim + first + 16 * i, a[r][i]);
}

template <Float kType, int kRows>
void accumulate_exact_block(const uint8_t* values, int64_t step, int tokens, int dim,
                            const float* p, float* acc) {
  int d = 0;
  for (; d + 64 <= dim; d += 64)
    accumulate_exact_rows<kType, kRows, 4>(values, step, tokens, d, dim, p, acc);
  for (; d < dim; d += 16)
    accumulate_exact_rows<kType, kRows, 1>(values, step, tokens, d, dim, p, acc);
}

template <Float kType>
void accumulate_exact_as(const uint8_t* values, int64_t stride, int tokens, int dim, const float* p,
                         int rows, bool skip_zero, float* acc) {
  const int64_t step = stride * size_of(kType);
  if (skip_zero) {
    for (int r = 0; r < rows; ++r)
      for (int t = 0; t < tokens; ++t)
        if (p[r * kTileTokens + t] != 0.0f)
          accumulate_exact_block<kType, 1>(values + t * step, step, 1, dim, p + r * kTileTokens + t,
                                           acc + r * dim);
    return;
  }
  for (int r = 0; r < rows; r += 4) {
    const auto add = rows - r == 1   ? accumulate_exact_block<kType, 1>
                     : rows - r == 2 ? accumulate_exact_block<kType, 2>
                     : rows - r == 3 ? accumulate_exact_block<kType, 3>
                                     : accumulate_exact_block<kType, 4>;
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

}  // namespace kvq::avx512vnni
KVQ_TARGET_END
#endif
