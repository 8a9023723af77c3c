#if defined(__x86_64__)
#include <immintrin.h>

#include <cstring>

#include "ops_cpu/e4m3.h"
#include "ops_cpu/exp2.h"
#include "ops_cpu/kernels.h"
#include "ops_cpu/region.h"

KVQ_TARGET_BEGIN("avx2,fma,f16c")
#include "ops_cpu/avx2/lanes.h"

namespace kvq::avx2 {
namespace {

inline __m256 magnitude(__m256 x) {
  return _mm256_and_ps(x, _mm256_castsi256_ps(_mm256_set1_epi32(INT32_MAX)));
}

float largest(const float* x, int dim) {
  __m256 most = _mm256_setzero_ps();
  for (int d = 0; d < dim; d += 8) most = _mm256_max_ps(magnitude(_mm256_loadu_ps(x + d)), most);
  return largest(most);
}

void range(const float* x, int dim, float* low, float* high) {
  __m256 least = _mm256_loadu_ps(x), most = least;
  for (int d = 8; d < dim; d += 8) {
    const __m256 v = _mm256_loadu_ps(x + d);
    least = _mm256_min_ps(v, least);
    most = _mm256_max_ps(v, most);
  }
  *low = -largest(_mm256_sub_ps(_mm256_setzero_ps(), least));
  *high = largest(most);
}

// Eight integers below 256 as bytes.
inline void store_bytes(uint8_t* p, __m256i v) {
  const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(words, words));
}

// As float_to_e4m3.
inline __m256i to_e4m3(__m256 x) {
  const __m256i sign =
      _mm256_and_si256(_mm256_srli_epi32(_mm256_castps_si256(x), 24), _mm256_set1_epi32(0x80));
  const __m256 a = _mm256_min_ps(magnitude(x), _mm256_set1_ps(kLargestE4M3));
  const __m256 shift = _mm256_set1_ps(16384.0f);
  const __m256i subnormal =
      _mm256_sub_epi32(_mm256_castps_si256(_mm256_add_ps(a, shift)), _mm256_castps_si256(shift));
  const __m256i bits = _mm256_castps_si256(a);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 20), _mm256_set1_epi32(1));
  const __m256i rounded =
      _mm256_add_epi32(_mm256_sub_epi32(bits, _mm256_set1_epi32((120 << 23) - 0x7FFFF)), odd);
  const __m256i small =
      _mm256_castps_si256(_mm256_cmp_ps(a, _mm256_set1_ps(1.0f / 64.0f), _CMP_LT_OQ));
  return _mm256_or_si256(sign,
                         _mm256_blendv_epi8(_mm256_srli_epi32(rounded, 20), subnormal, small));
}

void write_fp8(const float* x, int dim, float scale, uint8_t* codes) {
  if (!(scale > 0.0f)) {
    std::memset(codes, 0, dim);
    return;
  }
  const __m256 divisor = _mm256_set1_ps(scale);
  for (int d = 0; d < dim; d += 8)
    store_bytes(codes + d, to_e4m3(_mm256_div_ps(_mm256_loadu_ps(x + d), divisor)));
}

void write_int4(const float* x, int dim, float middle, float scale, uint8_t* codes) {
  if (!(scale > 0.0f)) {
    std::memset(codes, (kFarValueSteps + 1) / 2, dim);
    return;
  }
  const __m256 step = _mm256_set1_ps(2.0f * scale), center = _mm256_set1_ps(middle);
  const __m256 half = _mm256_set1_ps(kFarValueSteps / 2.0f);
  const __m256 most = _mm256_set1_ps(kFarValueSteps);
  for (int d = 0; d < dim; d += 8) {
    const __m256 offset = _mm256_sub_ps(_mm256_loadu_ps(x + d), center);
    const __m256 place = _mm256_add_ps(_mm256_div_ps(offset, step), half);
    store_bytes(codes + d,
                _mm256_cvtps_epi32(_mm256_min_ps(_mm256_max_ps(place, _mm256_setzero_ps()), most)));
  }
}

}  // namespace

const FarEncodeKernels far_encode{largest, range, write_fp8, write_int4};

}  // namespace kvq::avx2
KVQ_TARGET_END
#endif
