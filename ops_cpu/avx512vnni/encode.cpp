#if defined(__x86_64__)
#include <immintrin.h>

#include "ops_cpu/exp2.h"
#include "ops_cpu/kernels.h"
#include "ops_cpu/region.h"

KVQ_TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512vbmi,avx2,f16c")
#include "ops_cpu/avx512vnni/lanes.h"

namespace kvq::avx512vnni {
namespace {

// Codebooks are symmetric and their midpoints are multiples of one half, so a magnitude follows
// from floor(2 u) alone, below zero from its complement: a table of 128 bytes.
template <int kBits>
struct Magnitudes {
  static constexpr int kCount = 1 << (kBits - 1);
  alignas(64) uint8_t index[128];
  alignas(64) int8_t level[128];

  constexpr Magnitudes() : index(), level() {
    for (int v = 0; v < 128; ++v) {
      int i = 0;
      while (i + 1 < kCount && v >= level_of(kBits, kCount + i) + level_of(kBits, kCount + i + 1))
        ++i;
      index[v] = static_cast<uint8_t>(i);
      level[v] = level_of(kBits, kCount + i);
    }
  }
};
template <int kBits>
constexpr Magnitudes<kBits> kMagnitudes;

inline __m512i look(const void* table, __m512i at) {
  const auto* t = static_cast<const uint8_t*>(table);
  return _mm512_permutex2var_epi8(_mm512_load_si512(t), at, _mm512_load_si512(t + 64));
}

// floor(2 u) of 64 channels, saturated to a byte.
inline __m512i doubled_floor64(const float* z, __m512 doubled_step) {
  __m128i part[4];
  for (int i = 0; i < 4; ++i) {
    const __m512 v = _mm512_roundscale_ps(_mm512_mul_ps(_mm512_load_ps(z + 16 * i), doubled_step),
                                          _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    part[i] = _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(v));
  }
  const __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(part[0]), part[1], 1);
  const __m256i high = _mm256_inserti128_si256(_mm256_castsi128_si256(part[2]), part[3], 1);
  return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

// The complement of negative values: what the tables are entered with.
inline __m512i fold_sign(__m512i v, __mmask64* negative) {
  *negative = _mm512_movepi8_mask(v);
  return _mm512_xor_si512(v, _mm512_movm_epi8(*negative));
}

// Channels of the last 64 that exist.
inline __mmask64 existing(int left) { return left >= 64 ? ~0ull : (1ull << left) - 1; }

// <z, c> and <c, c> for the codes under one step.
template <int kBits>
void try_step_of(const float* z, int dim, float step, float* product, float* norm) {
  const __m512 doubled_step = _mm512_set1_ps(2.0f * step);
  __m512 sum = _mm512_setzero_ps();
  __m512i squares = _mm512_setzero_si512();
  for (int d = 0; d < dim; d += 64) {
    __mmask64 negative;
    const __m512i at = fold_sign(doubled_floor64(z + d, doubled_step), &negative);
    const __m512i magnitude =
        _mm512_maskz_mov_epi8(existing(dim - d), look(kMagnitudes<kBits>.level, at));
    squares = _mm512_dpbusd_epi32(squares, magnitude, magnitude);
    const __m512i level =
        _mm512_mask_sub_epi8(magnitude, negative, _mm512_setzero_si512(), magnitude);
    const __m128i part[4] = {_mm512_castsi512_si128(level), _mm512_extracti32x4_epi32(level, 1),
                             _mm512_extracti32x4_epi32(level, 2),
                             _mm512_extracti32x4_epi32(level, 3)};
    for (int i = 0; i < 4 && d + 16 * i < dim; ++i)
      sum = _mm512_add_ps(sum, _mm512_mul_ps(_mm512_load_ps(z + d + 16 * i),
                                             _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(part[i]))));
  }
  *product = fold(sum);
  *norm = static_cast<float>(_mm512_reduce_add_epi32(squares));
}

template <int kBits>
void write_codes_of(const float* z, int dim, float step, uint8_t* codes) {
  constexpr int kCount = Magnitudes<kBits>::kCount;
  for (int d = 0; d < dim; d += 64) {
    __mmask64 negative;
    const __m512i at = fold_sign(doubled_floor64(z + d, _mm512_set1_ps(2.0f * step)), &negative);
    const __m512i index = look(kMagnitudes<kBits>.index, at);
    const __m512i code = _mm512_mask_sub_epi8(_mm512_add_epi8(index, _mm512_set1_epi8(kCount)),
                                              negative, _mm512_set1_epi8(kCount - 1), index);
    _mm512_mask_storeu_epi8(codes + d, existing(dim - d), code);
  }
}

float sum_of_squares(const float* z, int dim) {
  __m512 sum = _mm512_setzero_ps();
  for (int d = 0; d < dim; d += 16) {
    const __m512 v = _mm512_load_ps(z + d);
    sum = _mm512_add_ps(sum, _mm512_mul_ps(v, v));
  }
  return fold(sum);
}

void try_step(const float* z, int dim, int bits, float step, float* product, float* norm) {
  const auto run = bits == 4 ? try_step_of<4> : bits == 3 ? try_step_of<3> : try_step_of<2>;
  run(z, dim, step, product, norm);
}

void write_codes(const float* z, int dim, int bits, float step, uint8_t* codes) {
  const auto run = bits == 4   ? write_codes_of<4>
                   : bits == 3 ? write_codes_of<3>
                               : write_codes_of<2>;
  run(z, dim, step, codes);
}

}  // namespace

const EncodeKernels encode{sum_of_squares, try_step, write_codes};

}  // namespace kvq::avx512vnni
KVQ_TARGET_END
#endif
