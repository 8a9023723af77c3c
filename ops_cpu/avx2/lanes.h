// Small vector helpers of this tier. Included inside the target region; the caller includes
// <immintrin.h>, ops_cpu/kernels.h and ops_cpu/exp2.h before it.
#pragma once

namespace kvq::avx2 {
namespace {

inline __m256 load8(const void* p, Float type, int64_t i) {
  if (type == Float::kFloat32) return _mm256_loadu_ps(static_cast<const float*>(p) + i);
  const __m128i h =
      _mm_loadu_si128(reinterpret_cast<const __m128i*>(static_cast<const uint16_t*>(p) + i));
  if (type == Float::kFloat16) return _mm256_cvtph_ps(h);
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}

inline __m256 load8_s8(const int8_t* p) {
  return _mm256_cvtepi32_ps(
      _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}

// Sixteen lanes in two registers, folded 8, 4, 2 and 1 apart.
inline float fold(__m256 lo, __m256 hi) {
  const __m256 eight = _mm256_add_ps(lo, hi);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

inline float largest(__m256 v) {
  __m128 m = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  m = _mm_max_ps(m, _mm_movehl_ps(m, m));
  return _mm_cvtss_f32(_mm_max_ss(m, _mm_shuffle_ps(m, m, 1)));
}

inline __m256 exp2_nonpositive8(__m256 x) {
  const __m256 normal = _mm256_cmp_ps(x, _mm256_set1_ps(kExp2Lowest), _CMP_NLT_UQ);
  const __m256 clamped = _mm256_max_ps(_mm256_set1_ps(kExp2Lowest), x);
  const __m256 whole = _mm256_floor_ps(clamped);
  const __m256 r = _mm256_sub_ps(clamped, whole);
  __m256 p = _mm256_set1_ps(kExp2[5]);
  for (int i = 4; i >= 0; --i) p = _mm256_add_ps(_mm256_mul_ps(p, r), _mm256_set1_ps(kExp2[i]));
  const __m256i exponent = _mm256_slli_epi32(_mm256_cvtps_epi32(whole), 23);
  p = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), exponent));
  return _mm256_and_ps(p, normal);
}

inline void prefetch(const uint8_t* p) {
  _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T1);
}

}  // namespace
}  // namespace kvq::avx2
