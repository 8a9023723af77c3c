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

// The magnitudes of a codebook. Codebooks are symmetric and their midpoints are multiples of one
// half, so a magnitude follows from floor(2 u) alone: below zero from its complement.
template <int kBits>
struct Magnitudes {
  static constexpr int kCount = 1 << (kBits - 1);
  alignas(32) int8_t level[32];  // twice, for both halves of a register
  int8_t twice[kCount - 1];      // twice the midpoints between them, less one

  constexpr Magnitudes() : level(), twice() {
    for (int i = 0; i < 32; ++i)
      level[i] = i % 16 < kCount ? level_of(kBits, kCount + i % 16) : int8_t{0};
    for (int i = 0; i + 1 < kCount; ++i)
      twice[i] = static_cast<int8_t>(level[i] + level[i + 1] - 1);
  }
};
template <int kBits>
constexpr Magnitudes<kBits> kMagnitudes;

// Magnitude index of 32 channels, and -1 where a channel is negative.
struct Indices {
  __m256i magnitude, sign;
};

template <int kBits>
inline Indices indices32(const float* z, __m256 doubled_step) {
  __m256i v[4];
  for (int i = 0; i < 4; ++i)
    v[i] =
        _mm256_cvtps_epi32(_mm256_floor_ps(_mm256_mul_ps(_mm256_load_ps(z + 8 * i), doubled_step)));
  const __m256i packed =
      _mm256_packs_epi16(_mm256_packs_epi32(v[0], v[1]), _mm256_packs_epi32(v[2], v[3]));
  const __m256i floor2 =
      _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  Indices out{_mm256_setzero_si256(), _mm256_cmpgt_epi8(_mm256_setzero_si256(), floor2)};
  const __m256i w = _mm256_xor_si256(floor2, out.sign);
  using Table = Magnitudes<kBits>;
#pragma GCC unroll 7
  for (int i = 0; i + 1 < Table::kCount; ++i)
    out.magnitude = _mm256_sub_epi8(
        out.magnitude, _mm256_cmpgt_epi8(w, _mm256_set1_epi8(kMagnitudes<kBits>.twice[i])));
  return out;
}

inline int sum_epi32(__m256i v) {
  __m128i s = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4E));
  return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xB1)));
}

// <z, c> and <c, c> for the codes under one step.
template <int kBits>
void try_step_of(const float* z, int dim, float step, float* product, float* norm) {
  const __m256i levels =
      _mm256_load_si256(reinterpret_cast<const __m256i*>(kMagnitudes<kBits>.level));
  const __m256 doubled_step = _mm256_set1_ps(2.0f * step);
  __m256 lo = _mm256_setzero_ps(), hi = lo;
  __m256i squares = _mm256_setzero_si256();
  for (int d = 0; d < dim; d += 32) {
    const Indices index = indices32<kBits>(z + d, doubled_step);
    __m256i magnitude = _mm256_shuffle_epi8(levels, index.magnitude);
    if (d + 16 == dim)  // drop the padding
      magnitude = _mm256_permute2x128_si256(magnitude, magnitude, 0x80);
    squares = _mm256_add_epi32(
        squares,
        _mm256_madd_epi16(_mm256_maddubs_epi16(magnitude, magnitude), _mm256_set1_epi16(1)));
    const __m256i level = _mm256_sub_epi8(_mm256_xor_si256(magnitude, index.sign), index.sign);
    const __m128i half[2] = {_mm256_castsi256_si128(level), _mm256_extracti128_si256(level, 1)};
    for (int i = 0; i < 2; ++i) {
      const __m256 a = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(half[i]));
      const __m256 b = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(half[i], 8)));
      lo = _mm256_add_ps(lo, _mm256_mul_ps(_mm256_load_ps(z + d + 16 * i), a));
      hi = _mm256_add_ps(hi, _mm256_mul_ps(_mm256_load_ps(z + d + 16 * i + 8), b));
    }
  }
  *product = fold(lo, hi);
  *norm = static_cast<float>(sum_epi32(squares));
}

template <int kBits>
void write_codes_of(const float* z, int dim, float step, uint8_t* codes) {
  alignas(32) uint8_t out[kMaxHeadDim + 16];
  for (int d = 0; d < dim; d += 32) {
    const Indices index = indices32<kBits>(z + d, _mm256_set1_ps(2.0f * step));
    const __m256i code =
        _mm256_add_epi8(_mm256_xor_si256(index.magnitude, index.sign),
                        _mm256_set1_epi8(static_cast<char>(Magnitudes<kBits>::kCount)));
    _mm256_store_si256(reinterpret_cast<__m256i*>(out + d), code);
  }
  std::memcpy(codes, out, dim);
}

float sum_of_squares(const float* z, int dim) {
  __m256 lo = _mm256_setzero_ps(), hi = lo;
  for (int d = 0; d < dim; d += 16) {
    const __m256 a = _mm256_load_ps(z + d), b = _mm256_load_ps(z + d + 8);
    lo = _mm256_add_ps(lo, _mm256_mul_ps(a, a));
    hi = _mm256_add_ps(hi, _mm256_mul_ps(b, b));
  }
  return fold(lo, hi);
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

}  // namespace kvq::avx2
KVQ_TARGET_END
#endif
