#if defined(__x86_64__)
#include <immintrin.h>

#include <cstring>

#include "ops_cpu/exp2.h"
#include "ops_cpu/half.h"
#include "ops_cpu/kernels.h"
#include "ops_cpu/region.h"

KVQ_TARGET_BEGIN("avx2,fma,f16c")
#include "ops_cpu/avx2/lanes.h"

#include "ops_cpu/avx2/decode.h"

namespace kvq::avx2 {
namespace {

// Both 16-byte halves of a group of 2-bit codes: codes 0-31, then 32-63.
inline void unpack2(const uint8_t* packed, __m256i* codes) {
  const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(packed));
  const __m256i three = _mm256_set1_epi8(3);
  codes[0] = _mm256_and_si256(_mm256_set_m128i(_mm_srli_epi16(x, 2), x), three);
  codes[1] = _mm256_and_si256(_mm256_set_m128i(_mm_srli_epi16(x, 6), _mm_srli_epi16(x, 4)), three);
}

// 4 in every byte whose bit is set.
inline __m256i spread_bits(const uint8_t* bits) {
  int32_t word;
  std::memcpy(&word, bits, 4);
  const __m256i bytes = _mm256_shuffle_epi8(
      _mm256_set1_epi32(word),
      _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303));
  const __m256i bit = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201));
  const __m256i set = _mm256_cmpeq_epi8(_mm256_and_si256(bytes, bit), bit);
  return _mm256_and_si256(set, _mm256_set1_epi8(4));
}

template <int kBits>
inline void unpack_levels(const uint8_t* packed, __m256i* levels) {
  if constexpr (kBits == 8) {
    levels[0] = load32(packed);
    levels[1] = load32(packed + 32);
    return;
  } else {
    __m256i codes[2];
    if constexpr (kBits == 4) {
      const __m256i x = load32(packed), mask = _mm256_set1_epi8(15);
      codes[0] = _mm256_and_si256(x, mask);
      codes[1] = _mm256_and_si256(_mm256_srli_epi16(x, 4), mask);
    } else {
      unpack2(packed, codes);
      if constexpr (kBits == 3)
        for (int i = 0; i < 2; ++i)
          codes[i] = _mm256_or_si256(codes[i], spread_bits(packed + 16 + 4 * i));
    }
    const __m256i table = level_table<kBits, 0, 0>();
    for (int i = 0; i < 2; ++i) levels[i] = _mm256_shuffle_epi8(table, codes[i]);
  }
}

template <int kBits>
void decode_groups_of(const uint8_t* packed, const uint8_t* scales, int64_t count, float* out) {
  for (int64_t g = 0; g < count; ++g) {
    uint16_t half;
    std::memcpy(&half, scales + 2 * g, 2);
    const __m256 scale = _mm256_set1_ps(half_to_float(half));
    alignas(32) int8_t level[kGroupCodes];
    __m256i levels[2];
    unpack_levels<kBits>(packed + g * kGroupCodes * kBits / 8, levels);
    for (int i = 0; i < 2; ++i)
      _mm256_store_si256(reinterpret_cast<__m256i*>(level + 32 * i), levels[i]);
    for (int i = 0; i < kGroupCodes; i += 8)
      _mm256_storeu_ps(out + g * kGroupCodes + i, _mm256_mul_ps(load8_s8(level + i), scale));
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

// Four channels of four tokens at a time.
void transpose(const float* group, const float* offset, float* rows, int64_t stride) {
  for (int c = 0; c < kGroupCodes; c += 4) {
    const __m128 add = _mm_loadu_ps(offset + c);
    for (int t = 0; t < kTileTokens; t += 4) {
      __m128 x[4];
      for (int i = 0; i < 4; ++i) x[i] = _mm_loadu_ps(group + (c + i) * kTileTokens + t);
      _MM_TRANSPOSE4_PS(x[0], x[1], x[2], x[3]);
      for (int i = 0; i < 4; ++i) _mm_storeu_ps(rows + (t + i) * stride + c, _mm_add_ps(x[i], add));
    }
  }
}

void write_int8(const float* x, float scale, uint8_t* codes) {
  if (!(scale > 0.0f)) {
    std::memset(codes, 0, kGroupCodes);
    return;
  }
  const __m256 divisor = _mm256_set1_ps(scale);
  const __m256 most = _mm256_set1_ps(127.0f), least = _mm256_set1_ps(-127.0f);
  for (int i = 0; i < kGroupCodes; i += 8) {
    const __m256 step = _mm256_div_ps(_mm256_loadu_ps(x + i), divisor);
    const __m256i code = _mm256_cvtps_epi32(_mm256_max_ps(_mm256_min_ps(step, most), least));
    const __m128i words =
        _mm_packs_epi32(_mm256_castsi256_si128(code), _mm256_extracti128_si256(code, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(codes + i), _mm_packs_epi16(words, words));
  }
}

}  // namespace

const XKernels x{decode_groups, transpose, write_int8};

}  // namespace kvq::avx2
KVQ_TARGET_END
#endif
