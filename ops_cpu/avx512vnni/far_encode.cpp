#if defined(__x86_64__)
#include <immintrin.h>

#include <cstring>

#include "ops_cpu/e4m3.h"
#include "ops_cpu/exp2.h"
#include "ops_cpu/kernels.h"
#include "ops_cpu/region.h"

KVQ_TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512vbmi,avx2,fma,f16c")
#include "ops_cpu/avx512vnni/lanes.h"

namespace kvq::avx512vnni {
namespace {

float largest(const float* x, int dim) {
  __m512 most = _mm512_setzero_ps();
  for (int d = 0; d < dim; d += 16)
    most = _mm512_max_ps(_mm512_abs_ps(_mm512_loadu_ps(x + d)), most);
  return _mm512_reduce_max_ps(most);
}

void range(const float* x, int dim, float* low, float* high) {
  __m512 least = _mm512_loadu_ps(x), most = least;
  for (int d = 16; d < dim; d += 16) {
    const __m512 v = _mm512_loadu_ps(x + d);
    least = _mm512_min_ps(v, least);
    most = _mm512_max_ps(v, most);
  }
  *low = _mm512_reduce_min_ps(least);
  *high = _mm512_reduce_max_ps(most);
}

inline void store_bytes(uint8_t* p, __m512i v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(v));
}

// As float_to_e4m3.
inline __m512i to_e4m3(__m512 x) {
  const __m512i sign =
      _mm512_and_si512(_mm512_srli_epi32(_mm512_castps_si512(x), 24), _mm512_set1_epi32(0x80));
  const __m512 a = _mm512_min_ps(_mm512_abs_ps(x), _mm512_set1_ps(kLargestE4M3));
  const __m512 shift = _mm512_set1_ps(16384.0f);
  const __m512i subnormal =
      _mm512_sub_epi32(_mm512_castps_si512(_mm512_add_ps(a, shift)), _mm512_castps_si512(shift));
  const __m512i bits = _mm512_castps_si512(a);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 20), _mm512_set1_epi32(1));
  const __m512i rounded =
      _mm512_add_epi32(_mm512_sub_epi32(bits, _mm512_set1_epi32((120 << 23) - 0x7FFFF)), odd);
  const __mmask16 small = _mm512_cmp_ps_mask(a, _mm512_set1_ps(1.0f / 64.0f), _CMP_LT_OQ);
  return _mm512_or_si512(sign,
                         _mm512_mask_mov_epi32(_mm512_srli_epi32(rounded, 20), small, subnormal));
}

void write_fp8(const float* x, int dim, float scale, uint8_t* codes) {
  if (!(scale > 0.0f)) {
    std::memset(codes, 0, dim);
    return;
  }
  const __m512 divisor = _mm512_set1_ps(scale);
  for (int d = 0; d < dim; d += 16)
    store_bytes(codes + d, to_e4m3(_mm512_div_ps(_mm512_loadu_ps(x + d), divisor)));
}

void write_int4(const float* x, int dim, float middle, float scale, uint8_t* codes) {
  if (!(scale > 0.0f)) {
    std::memset(codes, (kFarValueSteps + 1) / 2, dim);
    return;
  }
  const __m512 step = _mm512_set1_ps(2.0f * scale), center = _mm512_set1_ps(middle);
  const __m512 half = _mm512_set1_ps(kFarValueSteps / 2.0f);
  const __m512 most = _mm512_set1_ps(kFarValueSteps);
  for (int d = 0; d < dim; d += 16) {
    const __m512 offset = _mm512_sub_ps(_mm512_loadu_ps(x + d), center);
    const __m512 place = _mm512_add_ps(_mm512_div_ps(offset, step), half);
    store_bytes(codes + d,
                _mm512_cvtps_epi32(_mm512_min_ps(_mm512_max_ps(place, _mm512_setzero_ps()), most)));
  }
}

}  // namespace

const FarEncodeKernels far_encode{largest, range, write_fp8, write_int4};

}  // namespace kvq::avx512vnni
KVQ_TARGET_END
#endif
