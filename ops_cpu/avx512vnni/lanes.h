// Small vector helpers of this tier. Included inside the target region; the caller includes
// <immintrin.h>, ops_cpu/kernels.h and ops_cpu/exp2.h before it.
#pragma once

namespace kvq::avx512vnni {
namespace {

inline __m512 load16(const void* p, Float type, int64_t i) {
  if (type == Float::kFloat32) return _mm512_loadu_ps(static_cast<const float*>(p) + i);
  const __m256i h =
      _mm256_loadu_si256(reinterpret_cast<const __m256i*>(static_cast<const uint16_t*>(p) + i));
  if (type == Float::kFloat16) return _mm512_cvtph_ps(h);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
}

inline __m512 load16_s8(const int8_t* p) {
  return _mm512_cvtepi32_ps(
      _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}

// Sixteen lanes folded 8 apart.
inline __m256 fold8(__m512 v) {
  return _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
}

// Sixteen lanes folded 8, 4, 2 and 1 apart.
inline float fold(__m512 v) {
  const __m256 eight = fold8(v);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

// Four times sixteen lanes folded 8, 4, 2 and 1 apart.
inline __m128 fold4(const __m512* sums) {
  __m256 four[2];
  for (int i = 0; i < 2; ++i) {
    const __m256 a = fold8(sums[2 * i]), b = fold8(sums[2 * i + 1]);
    four[i] = _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
  }
  // four[0] holds sums 0 | 1 and four[1] sums 2 | 3, four lanes each.
  const __m256 two = _mm256_add_ps(_mm256_shuffle_ps(four[0], four[1], 0x44),
                                   _mm256_shuffle_ps(four[0], four[1], 0xEE));
  const __m256 one = _mm256_add_ps(two, _mm256_permute_ps(two, 0xB1));
  const __m128 even = _mm256_castps256_ps128(one), odd = _mm256_extractf128_ps(one, 1);
  return _mm_unpacklo_ps(_mm_shuffle_ps(even, even, 0x08), _mm_shuffle_ps(odd, odd, 0x08));
}

inline __m512 exp2_nonpositive16(__m512 x) {
  const __mmask16 normal = _mm512_cmp_ps_mask(x, _mm512_set1_ps(kExp2Lowest), _CMP_NLT_UQ);
  const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  const __m512 r = _mm512_sub_ps(x, whole);
  __m512 p = _mm512_set1_ps(kExp2[5]);
  for (int i = 4; i >= 0; --i) p = _mm512_add_ps(_mm512_mul_ps(p, r), _mm512_set1_ps(kExp2[i]));
  return _mm512_maskz_scalef_ps(normal, p, whole);
}

inline void prefetch(const uint8_t* p) {
  _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_NTA);
}

}  // namespace
}  // namespace kvq::avx512vnni
