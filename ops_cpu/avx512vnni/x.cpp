#if defined(__x86_64__)
#include <immintrin.h>

#include <cstring>

#include "ops_cpu/exp2.h"
#include "ops_cpu/half.h"
#include "ops_cpu/kernels.h"
#include "ops_cpu/region.h"

KVQ_TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512vbmi,avx2,fma,f16c")
#include "ops_cpu/avx512vnni/lanes.h"

namespace kvq::avx512vnni {
namespace {

template <int kBits>
struct LevelTable {
  alignas(16) int8_t byte[16];
  constexpr LevelTable() : byte() {
    for (int i = 0; i < 16; ++i) byte[i] = level_of(kBits, i & ((1 << kBits) - 1));
  }
};
template <int kBits>
constexpr LevelTable<kBits> kLevelTable;

inline __m128i load_bytes(const int8_t* p) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
}

// The levels of a group, 64 bytes.
template <int kBits>
inline __m512i unpack_levels(const uint8_t* packed) {
  if constexpr (kBits == 8) {
    return _mm512_loadu_si512(packed);
  } else if constexpr (kBits == 4) {
    const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(packed));
    const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(x), _mm256_srli_epi16(x, 4), 1);
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(load_bytes(kLevelTable<4>.byte)),
                               _mm512_and_si512(both, _mm512_set1_epi8(15)));
  } else {
    const __m512i x =
        _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(packed)));
    const __m512i shifts = _mm512_setr_epi64(0, 0, 2, 2, 4, 4, 6, 6);
    __m512i codes = _mm512_and_si512(_mm512_srlv_epi64(x, shifts), _mm512_set1_epi8(3));
    if constexpr (kBits == 3) {
      uint64_t high;
      std::memcpy(&high, packed + 16, 8);
      codes = _mm512_or_si512(codes, _mm512_maskz_set1_epi8(high, 4));
    }
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(load_bytes(kLevelTable<kBits>.byte)), codes);
  }
}

template <int kBits>
void decode_groups_of(const uint8_t* packed, const uint8_t* scales, int64_t count, float* out) {
  for (int64_t g = 0; g < count; ++g) {
    uint16_t half;
    std::memcpy(&half, scales + 2 * g, 2);
    const __m512 scale = _mm512_set1_ps(_mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(half))));
    const __m512i levels = unpack_levels<kBits>(packed + g * kGroupCodes * kBits / 8);
    const __m128i part[4] = {_mm512_castsi512_si128(levels), _mm512_extracti32x4_epi32(levels, 1),
                             _mm512_extracti32x4_epi32(levels, 2),
                             _mm512_extracti32x4_epi32(levels, 3)};
    for (int i = 0; i < 4; ++i)
      _mm512_storeu_ps(out + g * kGroupCodes + 16 * i,
                       _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(part[i])), scale));
  }
}

void decode_groups(const uint8_t* packed, const uint8_t* scales, int64_t count, int bits,
                   float* out) {
  const auto run = bits == 8   ? decode_groups_of<8>
                   : bits == 4 ? decode_groups_of<4>
                   : bits == 3 ? decode_groups_of<3>
                               : decode_groups_of<2>;
  run(packed, scales, count, out);
}

// Four channels of four tokens in each quarter of a register.
void transpose(const float* group, const float* offset, float* rows, int64_t stride) {
  for (int c = 0; c < kGroupCodes; c += 4) {
    const __m128 add = _mm_loadu_ps(offset + c);
    for (int t = 0; t < kTileTokens; t += 16) {
      __m512 x[4], y[4];
      for (int i = 0; i < 4; ++i) x[i] = _mm512_loadu_ps(group + (c + i) * kTileTokens + t);
      for (int i = 0; i < 2; ++i) {
        y[2 * i] = _mm512_unpacklo_ps(x[2 * i], x[2 * i + 1]);
        y[2 * i + 1] = _mm512_unpackhi_ps(x[2 * i], x[2 * i + 1]);
      }
      x[0] = _mm512_shuffle_ps(y[0], y[2], 0x44);
      x[1] = _mm512_shuffle_ps(y[0], y[2], 0xEE);
      x[2] = _mm512_shuffle_ps(y[1], y[3], 0x44);
      x[3] = _mm512_shuffle_ps(y[1], y[3], 0xEE);
      for (int i = 0; i < 4; ++i) {
        float* row = rows + (t + i) * stride + c;
        _mm_storeu_ps(row, _mm_add_ps(_mm512_castps512_ps128(x[i]), add));
        _mm_storeu_ps(row + 4 * stride, _mm_add_ps(_mm512_extractf32x4_ps(x[i], 1), add));
        _mm_storeu_ps(row + 8 * stride, _mm_add_ps(_mm512_extractf32x4_ps(x[i], 2), add));
        _mm_storeu_ps(row + 12 * stride, _mm_add_ps(_mm512_extractf32x4_ps(x[i], 3), add));
      }
    }
  }
}

void write_int8(const float* x, float scale, uint8_t* codes) {
  if (!(scale > 0.0f)) {
    std::memset(codes, 0, kGroupCodes);
    return;
  }
  const __m512 divisor = _mm512_set1_ps(scale);
  const __m512 most = _mm512_set1_ps(127.0f), least = _mm512_set1_ps(-127.0f);
  for (int i = 0; i < kGroupCodes; i += 16) {
    const __m512 step = _mm512_div_ps(_mm512_loadu_ps(x + i), divisor);
    const __m512i code = _mm512_cvtps_epi32(_mm512_max_ps(_mm512_min_ps(step, most), least));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + i), _mm512_cvtepi32_epi8(code));
  }
}

}  // namespace

const XKernels x{decode_groups, transpose, write_int8};

}  // namespace kvq::avx512vnni
KVQ_TARGET_END
#endif
