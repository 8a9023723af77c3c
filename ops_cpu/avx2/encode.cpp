#if defined(__x86_64__)
#include <immintrin.h>

#include <cmath>
#include <cstring>

#include "ops_cpu/exp2.h"
#include "ops_cpu/kernels.h"
#include "ops_cpu/region.h"

KVQ_TARGET_BEGIN("avx2,f16c")
#include "ops_cpu/avx2/lanes.h"

namespace kvq::avx2 {
namespace {

// floor(2 u) of 16 values as int16, saturated. A midpoint m is a multiple of one half, so
// m <= u is 2 m <= floor(2 u).
inline __m256i doubled_floor16(const float* z, __m256 step) {
  const __m256 two = _mm256_set1_ps(2.0f);
  const __m256 limit = _mm256_set1_ps(20000.0f);
  __m256i half[2];
  for (int i = 0; i < 2; ++i) {
    const __m256 u = _mm256_mul_ps(_mm256_loadu_ps(z + 8 * i), step);
    __m256 v = _mm256_floor_ps(_mm256_mul_ps(u, two));
    v = _mm256_max_ps(_mm256_min_ps(v, limit), _mm256_sub_ps(_mm256_setzero_ps(), limit));
    half[i] = _mm256_cvtps_epi32(v);
  }
  return _mm256_permute4x64_epi64(_mm256_packs_epi32(half[0], half[1]), 0xD8);
}

struct Tables {
  __m256i level;  // levels, the table in both halves
  int count;
  int8_t twice[15];  // twice the midpoints

  explicit Tables(const Codebook& book) : count(book.count) {
    alignas(32) int8_t both[32] = {};
    for (int i = 0; i < count; ++i) both[i] = both[16 + i] = book.level[i];
    level = _mm256_load_si256(reinterpret_cast<const __m256i*>(both));
    for (int i = 0; i + 1 < count; ++i) twice[i] = static_cast<int8_t>(2 * book.midpoint[i]);
  }
};

// Codes of 32 channels: how many midpoints are <= u.
inline __m256i codes32(const float* z, __m256 step, const Tables& t) {
  const __m256i v = _mm256_permute4x64_epi64(
      _mm256_packs_epi16(doubled_floor16(z, step), doubled_floor16(z + 16, step)), 0xD8);
  __m256i code = _mm256_setzero_si256();
  for (int m = 0; m + 1 < t.count; ++m)
    code = _mm256_sub_epi8(
        code, _mm256_cmpgt_epi8(v, _mm256_set1_epi8(static_cast<char>(t.twice[m] - 1))));
  return code;
}

inline int sum_epi32(__m256i v) {
  __m128i s = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4E));
  return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xB1)));
}

void encode_vector(const float* z, int dim, int bits, uint8_t* codes, uint16_t* scale) {
  const Codebook& book = codebook(bits);
  const Tables tables(book);
  // A dim of 16 more than a multiple of 32 is padded: its zeros are not counted below.
  alignas(32) float padded[kMaxHeadDim + 16];
  std::memcpy(padded, z, sizeof(float) * dim);
  std::memset(padded + dim, 0, sizeof(float) * 16);

  __m256 lo = _mm256_setzero_ps(), hi = lo;
  for (int d = 0; d < dim; d += 16) {
    const __m256 a = _mm256_load_ps(padded + d), b = _mm256_load_ps(padded + d + 8);
    lo = _mm256_add_ps(lo, _mm256_mul_ps(a, a));
    hi = _mm256_add_ps(hi, _mm256_mul_ps(b, b));
  }
  const float rms = std::sqrt(fold(lo, hi) / static_cast<float>(dim));

  alignas(32) uint8_t trial[kMaxHeadDim + 16];
  alignas(32) int8_t levels[kMaxHeadDim + 16];
  float best = -1.0f, best_scale = 0.0f;
  for (int g = 0; g < kScaleCandidates; ++g) {
    const float step = rms > 0.0f ? book.per_sigma / (rms * kScaleCandidate[g]) : 0.0f;
    __m256i squares = _mm256_setzero_si256();
    for (int d = 0; d < dim; d += 32) {
      const __m256i code = codes32(padded + d, _mm256_set1_ps(step), tables);
      _mm256_store_si256(reinterpret_cast<__m256i*>(trial + d), code);
      __m256i level = _mm256_shuffle_epi8(tables.level, code);
      if (d + 16 == dim)
        level = _mm256_permute2x128_si256(level, level, 0x80);  // drop the padding
      _mm256_store_si256(reinterpret_cast<__m256i*>(levels + d), level);
      const __m256i magnitude = _mm256_abs_epi8(level);
      squares = _mm256_add_epi32(
          squares, _mm256_madd_epi16(_mm256_maddubs_epi16(magnitude, magnitude),
                                     _mm256_set1_epi16(1)));
    }
    lo = hi = _mm256_setzero_ps();
    for (int d = 0; d < dim; d += 16) {
      lo = _mm256_add_ps(lo, _mm256_mul_ps(_mm256_load_ps(padded + d), load8_s8(levels + d)));
      hi = _mm256_add_ps(hi,
                         _mm256_mul_ps(_mm256_load_ps(padded + d + 8), load8_s8(levels + d + 8)));
    }
    const float product = fold(lo, hi), norm = static_cast<float>(sum_epi32(squares));
    const float gain = product * product / norm;
    if (gain > best) {
      best = gain;
      best_scale = product / norm;
      std::memcpy(codes, trial, dim);
    }
  }
  if (!(rms > 0.0f)) best_scale = 0.0f;
  *scale = float_to_half(best_scale < kLargestInput ? best_scale : kLargestInput);
}

}  // namespace

const EncodeKernels encode{encode_vector};

}  // namespace kvq::avx2
KVQ_TARGET_END
#endif
