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

constexpr int kBlock = 4;       // rows that share one decoding
constexpr int kBoundSteps = 8;  // halvings of the range of scores

// The bytes of the bfloat16 of every E4M3 magnitude.
struct BfloatBytes {
  alignas(64) uint8_t low[128], high[128];
  constexpr BfloatBytes() : low(), high() {
    for (int i = 0; i < 128; ++i) {
      low[i] = static_cast<uint8_t>(e4m3_to_bfloat(static_cast<uint8_t>(i)) & 255);
      high[i] = static_cast<uint8_t>(e4m3_to_bfloat(static_cast<uint8_t>(i)) >> 8);
    }
  }
};

// A line of 16 tokens by 4 channels as four registers, one for each channel. The byte permutation
// ignores the sign, bit 7 of its indices.
struct Fp8Decoder {
  __m512i low[2], high[2], sign, upper;

  Fp8Decoder() {
    static constexpr BfloatBytes bytes;
    for (int i = 0; i < 2; ++i) {
      low[i] = _mm512_load_si512(bytes.low + 64 * i);
      high[i] = _mm512_load_si512(bytes.high + 64 * i);
    }
    sign = _mm512_set1_epi8(-128);
    upper = _mm512_set1_epi32(static_cast<int>(0xFFFF0000));
  }
  inline void operator()(const uint8_t* line, __m512* channel) const {
    const __m512i x = _mm512_loadu_si512(line);
    const __m512i l = _mm512_permutex2var_epi8(low[0], x, low[1]);
    const __m512i magnitude = _mm512_permutex2var_epi8(high[0], x, high[1]);
    const __m512i h = _mm512_ternarylogic_epi32(magnitude, x, sign, 0xF8);
    const __m512i pair[2] = {_mm512_unpacklo_epi8(l, h), _mm512_unpackhi_epi8(l, h)};
    for (int i = 0; i < 2; ++i) {
      channel[2 * i] = _mm512_castsi512_ps(_mm512_slli_epi32(pair[i], 16));
      channel[2 * i + 1] = _mm512_castsi512_ps(_mm512_and_si512(pair[i], upper));
    }
  }
};

template <int kRows>
void score_rows(const uint8_t* codes, const uint8_t* next, const uint16_t* key_scales, int dim,
                const float* query, float* scores) {
  const Fp8Decoder decode;
  const float* row[kRows];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) row[r] = query + static_cast<int64_t>(r) * dim;
  for (int t = 0; t < kTileTokens; t += 16) {
    __m512 sum[kRows][4];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) sum[r][j] = _mm512_setzero_ps();
    for (int64_t c = 0; c < dim; c += 4, codes += 64, next += 64) {
      prefetch(next);
      __m512 key[4];
      decode(codes, key);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j)
          sum[r][j] = _mm512_fmadd_ps(_mm512_set1_ps(row[r][c + j]), key[j], sum[r][j]);
    }
    const __m512 scale = load16(key_scales, Float::kFloat16, t);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const __m512 total =
          _mm512_add_ps(_mm512_add_ps(sum[r][0], sum[r][1]), _mm512_add_ps(sum[r][2], sum[r][3]));
      _mm512_storeu_ps(scores + r * kTileTokens + t, _mm512_mul_ps(total, scale));
    }
  }
}

void score_fp8(const uint8_t* codes, const uint8_t* next, const uint16_t* key_scales, int dim,
               const float* query, int rows, float* scores) {
  for (int r = 0; r < rows; r += kBlock, next = codes) {
    const auto score = rows - r == 1   ? score_rows<1>
                       : rows - r == 2 ? score_rows<2>
                       : rows - r == 3 ? score_rows<3>
                                       : score_rows<4>;
    score(codes, next, key_scales, dim, query + r * dim, scores + r * kTileTokens);
  }
}

void weigh_middles(const float* p, const uint16_t* middles, int rows, float* offsets) {
  __m512 middle[4];
  for (int i = 0; i < 4; ++i) middle[i] = load16(middles, Float::kFloat16, 16 * i);
  for (int r = 0; r < rows; ++r) {
    __m512 x[4];
    for (int i = 0; i < 4; ++i) {
      const __m512 w = _mm512_loadu_ps(p + r * kTileTokens + 16 * i);
      const __mmask16 used = _mm512_cmp_ps_mask(w, _mm512_setzero_ps(), _CMP_NEQ_UQ);
      x[i] = _mm512_maskz_mul_ps(used, w, middle[i]);
    }
    offsets[r] = fold(_mm512_add_ps(_mm512_add_ps(x[0], x[1]), _mm512_add_ps(x[2], x[3])));
  }
}

inline __m512i broadcast4(const uint8_t* p) {
  int32_t word;
  std::memcpy(&word, p, 4);
  return _mm512_set1_epi32(word);
}

// A line holds 8 tokens of 16 channels: four tokens in the low nibbles, four in the high ones. The
// weights of four tokens are two planes of 7 bits side by side, as quantize_weights leaves them.
template <int kRows>
inline void multiply_line(const uint8_t* line, const uint8_t* weights, __m512i (*sums)[2][2]) {
  const __m512i mask = _mm512_set1_epi8(15), x = _mm512_loadu_si512(line);
  const __m512i code[2] = {_mm512_and_si512(x, mask),
                           _mm512_and_si512(_mm512_srli_epi16(x, 4), mask)};
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
    for (int u = 0; u < 2; ++u)
#pragma GCC unroll 2
      for (int plane = 0; plane < 2; ++plane)
        sums[r][u][plane] = _mm512_dpbusd_epi32(
            sums[r][u][plane], broadcast4(weights + r * 2 * kTileTokens + 8 * u + 4 * plane),
            code[u]);
}

template <int kRows>
void accumulate_rows(const uint8_t* codes, const uint8_t* next, int dim, const uint8_t* weights,
                     const int32_t* weight_sums, const float* units, const float* offsets,
                     int groups, float* acc) {
  constexpr int kGroups = kTileTokens / kGroupTokens;
  for (int d = 0; d < dim; d += 16, codes += 64 * kGroups, next += 64 * kGroups) {
    __m512i sums[kRows][2][2];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
      for (int u = 0; u < 2; ++u) sums[r][u][0] = sums[r][u][1] = _mm512_setzero_si512();
    if (groups == kAllGroups) {
#pragma GCC unroll 8
      for (int g = 0; g < kGroups; ++g) {
        prefetch(next + 64 * g);
        multiply_line<kRows>(codes + 64 * g, weights + 2 * kGroupTokens * g, sums);
      }
    } else {
      for (int left = groups; left; left &= left - 1) {
        const int g = __builtin_ctz(left);
        multiply_line<kRows>(codes + 64 * g, weights + 2 * kGroupTokens * g, sums);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const __m512i low = _mm512_add_epi32(sums[r][0][0], sums[r][1][0]);
      const __m512i high = _mm512_add_epi32(sums[r][0][1], sums[r][1][1]);
      const __m512i twice = _mm512_slli_epi32(_mm512_add_epi32(low, _mm512_slli_epi32(high, 7)), 1);
      const __m512i total =
          _mm512_sub_epi32(twice, _mm512_set1_epi32(kFarValueSteps * weight_sums[r]));
      const __m512 added =
          _mm512_add_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(total), _mm512_set1_ps(units[r])),
                        _mm512_set1_ps(offsets[r]));
      float* a = acc + r * dim + d;
      _mm512_storeu_ps(a, _mm512_add_ps(_mm512_loadu_ps(a), added));
    }
  }
}

void accumulate_int4(const uint8_t* codes, const uint8_t* next, int dim, const void* weights,
                     const int32_t* sums, const float* units, const float* offsets, int groups,
                     int rows, float* acc) {
  for (int r = 0; r < rows; r += kBlock, next = codes) {
    const auto accumulate = rows - r == 1   ? accumulate_rows<1>
                            : rows - r == 2 ? accumulate_rows<2>
                            : rows - r == 3 ? accumulate_rows<3>
                                            : accumulate_rows<4>;
    accumulate(codes, next, dim, static_cast<const uint8_t*>(weights) + r * 2 * kTileTokens,
               sums + r, units + r, offsets + r, groups, acc + r * dim);
  }
}

int needed_groups(float* p, int rows, float bound) {
  const __m512 least = _mm512_set1_ps(bound);
  int groups = 0;
  for (int i = 0; i < 4; ++i) {
    unsigned tokens = 0;
    for (int r = 0; r < rows; ++r)
      tokens |=
          _mm512_cmp_ps_mask(_mm512_loadu_ps(p + r * kTileTokens + 16 * i), least, _CMP_NLT_UQ);
    groups |= ((tokens & 255) != 0) << 2 * i | (tokens >> 8 != 0) << (2 * i + 1);
  }
  if (groups == kAllGroups) return groups;
  for (int r = 0; r < rows; ++r)
    for (int g = 0; g < kTileTokens / kGroupTokens; ++g)
      if (!(groups >> g & 1))
        _mm256_storeu_ps(p + r * kTileTokens + g * kGroupTokens, _mm256_setzero_ps());
  return groups;
}

inline int count_from(const __m512* x, float bound) {
  const __m512 least = _mm512_set1_ps(bound);
  int count = 0;
  for (int i = 0; i < 4; ++i)
    count += __builtin_popcount(_mm512_cmp_ps_mask(x[i], least, _CMP_GE_OQ));
  return count;
}

// A bound that at least `wanted` of 64 scores reach, and not many more; below it when there are
// not as many.
float bound_of(const __m512* x, int wanted, float below) {
  const __m512 none = _mm512_set1_ps(-__builtin_inff());
  __m512 least = _mm512_set1_ps(__builtin_inff()), most = none;
  for (int i = 0; i < 4; ++i) {
    const __mmask16 finite = _mm512_cmp_ps_mask(x[i], none, _CMP_GT_OQ);
    least = _mm512_mask_min_ps(least, finite, x[i], least);
    most = _mm512_max_ps(x[i], most);
  }
  float low = _mm512_reduce_min_ps(least), high = _mm512_reduce_max_ps(most);
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
  __m512 most[4];
  for (__m512& x : most) x = _mm512_set1_ps(-__builtin_inff());
  for (int tile = 0; tile < tiles; ++tile)
    for (int i = 0; i < 4; ++i)
      most[i] = _mm512_max_ps(_mm512_loadu_ps(scores + tile * stride + 16 * i), most[i]);
  // The greatest of every place of a tile are different tokens.
  const __m512 bound = _mm512_set1_ps(bound_of(most, wanted, floor)), above = _mm512_set1_ps(floor);
  int count = 0;
  for (int tile = 0; tile < tiles; ++tile) {
    uint64_t tokens = 0;
    for (int i = 0; i < 4; ++i) {
      const __m512 x = _mm512_loadu_ps(scores + tile * stride + 16 * i);
      const unsigned found =
          _mm512_cmp_ps_mask(x, bound, _CMP_GE_OQ) & _mm512_cmp_ps_mask(x, above, _CMP_GT_OQ);
      tokens |= static_cast<uint64_t>(found) << 16 * i;
    }
    for (; tokens; tokens &= tokens - 1)
      places[count++] = static_cast<int16_t>(kTileTokens * tile + __builtin_ctzll(tokens));
  }
  return count;
}

}  // namespace

const FarAttentionKernels far_attention{score_fp8, weigh_middles, accumulate_int4, needed_groups,
                                        select};

}  // namespace kvq::avx512vnni
KVQ_TARGET_END
#endif
