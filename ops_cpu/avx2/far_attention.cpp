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

// An E4M3 code, shifted, is the float16 of its value times 2^-8, subnormals included; the exponent
// is made up for in the scale.
constexpr float kFromHalf = 256.0f;

constexpr int kBoundSteps = 8;  // halvings of the range of scores

inline __m256i load32(const uint8_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}

// Half a line, 8 tokens by 4 channels, as one register for each channel.
inline void decode_line(const uint8_t* half_line, float* channels) {
  const __m256i by_channel = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15));
  const __m256i together = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  const __m256i unsigned_exponent = _mm256_set1_epi16(static_cast<int16_t>(0xBFFF));
  const __m256i x =
      _mm256_permutevar8x32_epi32(_mm256_shuffle_epi8(load32(half_line), by_channel), together);
  const __m256i zero = _mm256_setzero_si256();
  // Channels 0 | 2, then 1 | 3.
  const __m256i pair[2] = {_mm256_unpacklo_epi8(zero, x), _mm256_unpackhi_epi8(zero, x)};
  for (int i = 0; i < 2; ++i) {
    const __m256i half = _mm256_and_si256(_mm256_srai_epi16(pair[i], 1), unsigned_exponent);
    _mm256_store_ps(channels + 8 * i, _mm256_cvtph_ps(_mm256_castsi256_si128(half)));
    _mm256_store_ps(channels + 8 * (2 + i), _mm256_cvtph_ps(_mm256_extracti128_si256(half, 1)));
  }
}

// Eight decoded tokens [dim, 8] with up to three rows, whose sums stay in registers.
template <int kRows>
void score_rows(const float* key, __m256 scale, int dim, const float* query, float* scores) {
  __m256 sum[kRows][4];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) sum[r][j] = _mm256_setzero_ps();
  for (int c = 0; c < dim; c += 4) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const __m256 k = _mm256_load_ps(key + 8 * (c + j));
#pragma GCC unroll 3
      for (int r = 0; r < kRows; ++r)
        sum[r][j] = _mm256_fmadd_ps(_mm256_set1_ps(query[r * dim + c + j]), k, sum[r][j]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
    const __m256 total =
        _mm256_add_ps(_mm256_add_ps(sum[r][0], sum[r][1]), _mm256_add_ps(sum[r][2], sum[r][3]));
    _mm256_storeu_ps(scores + r * kTileTokens, _mm256_mul_ps(total, scale));
  }
}

void score_fp8(const uint8_t* codes, const uint8_t* next, const uint16_t* key_scales, int dim,
               const float* query, int rows, float* scores) {
  alignas(32) float key[8 * kMaxHeadDim];
  const int lines = dim / 4;
  for (int t = 0; t < kTileTokens; t += 8) {
    const uint8_t* line = codes + (t >> 4) * lines * 64 + (t >> 3 & 1) * 32;
    for (int i = 0; i < lines; ++i, next += 32) {
      prefetch(next);
      decode_line(line + 64 * i, key + 32 * i);
    }
    const __m256 scale =
        _mm256_mul_ps(load8(key_scales, Float::kFloat16, t), _mm256_set1_ps(kFromHalf));
    for (int r = 0; r < rows;) {
      const int left = rows - r, block = left == 4 ? 2 : left < 3 ? left : 3;
      const auto score = block == 1 ? score_rows<1> : block == 2 ? score_rows<2> : score_rows<3>;
      score(key, scale, dim, query + r * dim, scores + r * kTileTokens + t);
      r += block;
    }
  }
}

void weigh_middles(const float* p, const uint16_t* middles, int rows, float* offsets) {
  for (int r = 0; r < rows; ++r) {
    __m256 x[8];
    for (int i = 0; i < 8; ++i) {
      const __m256 w = _mm256_loadu_ps(p + r * kTileTokens + 8 * i);
      const __m256 used = _mm256_cmp_ps(w, _mm256_setzero_ps(), _CMP_NEQ_UQ);
      x[i] = _mm256_and_ps(_mm256_mul_ps(w, load8(middles, Float::kFloat16, 8 * i)), used);
    }
    __m256 lane[2];
    for (int j = 0; j < 2; ++j)
      lane[j] = _mm256_add_ps(_mm256_add_ps(x[j], x[2 + j]), _mm256_add_ps(x[4 + j], x[6 + j]));
    offsets[r] = fold(lane[0], lane[1]);
  }
}

inline __m256i broadcast4(const uint8_t* p) {
  int32_t word;
  std::memcpy(&word, p, 4);
  return _mm256_set1_epi32(word);
}

// Half a line holds 8 tokens of 8 channels: four tokens in the low nibbles, four in the high ones.
// The weights of four tokens are int16 in the order 0 2 1 3, as quantize_weights leaves them.
template <int kRows>
inline void multiply_line(const uint8_t* half_line, const uint8_t* weights, __m256i* sums) {
  const __m256i mask = _mm256_set1_epi16(15), x = load32(half_line);
  const __m256i code[4] = {
      _mm256_and_si256(x, mask), _mm256_and_si256(_mm256_srli_epi16(x, 8), mask),
      _mm256_and_si256(_mm256_srli_epi16(x, 4), mask), _mm256_srli_epi16(x, 12)};
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
    __m256i product[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
      product[i] = _mm256_madd_epi16(code[i], broadcast4(weights + r * 2 * kTileTokens + 4 * i));
    const __m256i low = _mm256_add_epi32(product[0], product[1]);
    const __m256i high = _mm256_add_epi32(product[2], product[3]);
    sums[r] = _mm256_add_epi32(sums[r], _mm256_add_epi32(low, high));
  }
}

template <int kRows>
void accumulate_rows(const uint8_t* codes, const uint8_t* next, int dim, const uint8_t* weights,
                     const int32_t* weight_sums, const float* units, const float* offsets,
                     int groups, float* acc) {
  constexpr int kGroups = kTileTokens / kGroupTokens;
  for (int d = 0; d < dim; d += 8) {
    const int first = (d >> 4) * 64 * kGroups + (d >> 3 & 1) * 32;
    __m256i sums[kRows];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) sums[r] = _mm256_setzero_si256();
    if (groups == kAllGroups) {
      for (int g = 0; g < kGroups; ++g) {
        prefetch(next + first + 64 * g);
        multiply_line<kRows>(codes + first + 64 * g, weights + 2 * kGroupTokens * g, sums);
      }
    } else {
      for (int left = groups; left; left &= left - 1) {
        const int g = __builtin_ctz(left);
        multiply_line<kRows>(codes + first + 64 * g, weights + 2 * kGroupTokens * g, sums);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const __m256i total = _mm256_sub_epi32(_mm256_slli_epi32(sums[r], 1),
                                             _mm256_set1_epi32(kFarValueSteps * weight_sums[r]));
      const __m256 added =
          _mm256_add_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(total), _mm256_set1_ps(units[r])),
                        _mm256_set1_ps(offsets[r]));
      float* a = acc + r * dim + d;
      _mm256_storeu_ps(a, _mm256_add_ps(_mm256_loadu_ps(a), added));
    }
  }
}

void accumulate_int4(const uint8_t* codes, const uint8_t* next, int dim, const void* weights,
                     const int32_t* sums, const float* units, const float* offsets, int groups,
                     int rows, float* acc) {
  for (int r = 0; r < rows; r += 4, next = codes) {
    const auto accumulate = rows - r == 1   ? accumulate_rows<1>
                            : rows - r == 2 ? accumulate_rows<2>
                            : rows - r == 3 ? accumulate_rows<3>
                                            : accumulate_rows<4>;
    accumulate(codes, next, dim, static_cast<const uint8_t*>(weights) + r * 2 * kTileTokens,
               sums + r, units + r, offsets + r, groups, acc + r * dim);
  }
}

int needed_groups(float* p, int rows, float bound) {
  const __m256 least = _mm256_set1_ps(bound);
  int groups = 0;
  for (int g = 0; g < kTileTokens / kGroupTokens; ++g) {
    int tokens = 0;
    for (int r = 0; r < rows; ++r)
      tokens |= _mm256_movemask_ps(_mm256_cmp_ps(
          _mm256_loadu_ps(p + r * kTileTokens + g * kGroupTokens), least, _CMP_NLT_UQ));
    groups |= (tokens != 0) << g;
  }
  if (groups == kAllGroups) return groups;
  for (int r = 0; r < rows; ++r)
    for (int g = 0; g < kTileTokens / kGroupTokens; ++g)
      if (!(groups >> g & 1))
        _mm256_storeu_ps(p + r * kTileTokens + g * kGroupTokens, _mm256_setzero_ps());
  return groups;
}

inline int count_from(const __m256* x, float bound) {
  const __m256 least = _mm256_set1_ps(bound);
  int count = 0;
  for (int i = 0; i < 8; ++i)
    count += __builtin_popcount(_mm256_movemask_ps(_mm256_cmp_ps(x[i], least, _CMP_GE_OQ)));
  return count;
}

// A bound that at least `wanted` of 64 scores reach, and not many more; below it when there are
// not as many.
float bound_of(const __m256* x, int wanted, float below) {
  const __m256 none = _mm256_set1_ps(-__builtin_inff()), sign = _mm256_set1_ps(-0.0f);
  __m256 least = none, most = none;  // of the negative scores, and of the scores
  for (int i = 0; i < 8; ++i) {
    const __m256 finite = _mm256_cmp_ps(x[i], none, _CMP_GT_OQ);
    least = _mm256_max_ps(_mm256_blendv_ps(none, _mm256_xor_ps(x[i], sign), finite), least);
    most = _mm256_max_ps(x[i], most);
  }
  float low = -largest(least), high = largest(most);
  if (low < below) low = below;
  if (count_from(x, low) < wanted) return below;
  for (int i = 0; i < kBoundSteps; ++i) {
    const float middle = 0.5f * (low + high);
    const int count = count_from(x, middle);
    (count < wanted ? high : low) = middle;
    if (count >= wanted && count <= wanted + wanted / 4) break;
  }
  return low;
}

int select(const float* scores, int64_t stride, int tiles, int wanted, float floor,
           int16_t* places) {
  __m256 most[8];
  for (__m256& x : most) x = _mm256_set1_ps(-__builtin_inff());
  for (int tile = 0; tile < tiles; ++tile)
    for (int i = 0; i < 8; ++i)
      most[i] = _mm256_max_ps(_mm256_loadu_ps(scores + tile * stride + 8 * i), most[i]);
  // The greatest of every place of a tile are different tokens.
  const __m256 bound = _mm256_set1_ps(bound_of(most, wanted, floor)), above = _mm256_set1_ps(floor);
  int count = 0;
  for (int tile = 0; tile < tiles; ++tile) {
    uint64_t tokens = 0;
    for (int i = 0; i < 8; ++i) {
      const __m256 x = _mm256_loadu_ps(scores + tile * stride + 8 * i);
      const __m256 found =
          _mm256_and_ps(_mm256_cmp_ps(x, bound, _CMP_GE_OQ), _mm256_cmp_ps(x, above, _CMP_GT_OQ));
      tokens |= static_cast<uint64_t>(_mm256_movemask_ps(found)) << 8 * i;
    }
    for (; tokens; tokens &= tokens - 1)
      places[count++] = static_cast<int16_t>(kTileTokens * tile + __builtin_ctzll(tokens));
  }
  return count;
}

}  // namespace

const FarAttentionKernels far_attention{score_fp8, weigh_middles, accumulate_int4, needed_groups,
                                        select};

}  // namespace kvq::avx2
KVQ_TARGET_END
#endif
