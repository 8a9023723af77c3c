#if defined(__x86_64__)
#include <immintrin.h>

#include <cstring>

#include "ops_cpu/exp2.h"
#include "ops_cpu/kernels.h"
#include "ops_cpu/region.h"

KVQ_TARGET_BEGIN("avx2,f16c")
#include "ops_cpu/avx2/decode.h"
#include "ops_cpu/avx2/lanes.h"

namespace kvq::avx2 {
namespace {

// Largest level, added to the levels to make them unsigned bytes of at most 126, 62 or 20.
//
// Exact: bytes widen to int16 and meet 14-bit integers in vpmaddwd. With the start at -63 times the
// sum of the integers, 512 * (126 + 63) * 8127 for keys and 64 * (126 + 63) * 16383 for values
// bound every partial sum, below 2^30. Measured against two 7-bit planes in vpmaddubsw this takes
// four multiplications for 64 codes instead of six.
//
// Fast: a product of vpmaddubsw is at most 126 * level for keys, whose bytes are up to 2 * level,
// and 127 * level for (signed) values; 16 bits hold a sum of 2 * kUnits of them. That is at 4 bits
// 4 * 127 * 63 = 32004, at 3 bits 8 * 127 * 31 = 31496 and at 2 bits 8 * 127 * 10 = 10160.
constexpr int largest_level(int bits) { return bits == 4 ? 63 : bits == 3 ? 31 : 10; }

inline __m256i broadcast4(const void* p) {
  int32_t word;
  std::memcpy(&word, p, 4);
  return _mm256_set1_epi32(word);
}

inline void store32(void* p, __m256i v) { _mm256_storeu_si256(static_cast<__m256i*>(p), v); }

// 16 integers as int16, each four in the order 0 2 1 3: the even and the odd bytes of a unit
// widen separately.
inline __m256i to_pairs(__m256i first, __m256i second) {
  const __m256i v = _mm256_permute4x64_epi64(_mm256_packs_epi32(first, second), 0xD8);
  return _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(v, 0xD8), 0xD8);
}

// 32 integers as bytes, in order.
inline __m256i to_bytes(const __m256i* v) {
  const __m256i packed =
      _mm256_packs_epi16(_mm256_packs_epi32(v[0], v[1]), _mm256_packs_epi32(v[2], v[3]));
  return _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

inline int sum_epi32(__m256i v) {
  __m128i s = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4E));
  return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xB1)));
}

// x * inverse rounded to 16 integers at a time; returns their sum. A count of 16 more than a
// multiple of 32 leaves the last bytes to a half store.
int32_t store_integers(const float* x, int count, float inverse, bool exact, void* out) {
  const __m256 factor = _mm256_set1_ps(inverse);
  __m256i total = _mm256_setzero_si256();
  auto* bytes = static_cast<uint8_t*>(out);
  for (int d = 0; d < count; d += 16) {
    __m256i v[4];
    for (int i = 0; i < 2; ++i) {
      v[i] = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + d + 8 * i), factor));
      total = _mm256_add_epi32(total, v[i]);
    }
    if (exact) {
      store32(bytes + 2 * d, to_pairs(v[0], v[1]));
    } else {
      v[2] = v[3] = _mm256_setzero_si256();
      _mm_storeu_si128(reinterpret_cast<__m128i*>(bytes + d), _mm256_castsi256_si128(to_bytes(v)));
    }
  }
  return sum_epi32(total);
}

void quantize_query(const float* x, int dim, bool exact, void* out, int32_t* sum, float* unit) {
  const __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(INT32_MAX));
  __m256 max = _mm256_setzero_ps();
  for (int d = 0; d < dim; d += 8)
    max = _mm256_max_ps(_mm256_and_ps(_mm256_loadu_ps(x + d), magnitude), max);
  const float most = largest(max);
  const float limit = exact ? kQueryLimitExact : kQueryLimitFast;
  *unit = most / limit;
  *sum = store_integers(x, dim, most > kSmallestMagnitude ? limit / most : 0.0f, exact, out);
}

// acc[r] += level * integer over the units of one decoder step; `row` is the first row's integers
// of the first unit and `stride` the bytes between rows. Products of two units are added to each
// other first: a chain of additions to acc would cost more than the multiplications.
template <int kRows, int kUnits>
inline void multiply_exact(const __m256i* level, const uint8_t* row, int stride, __m256i* acc) {
  const __m256i low = _mm256_set1_epi16(255);
#pragma GCC unroll 2
  for (int i = 0; i < kUnits; i += 2) {
    const __m256i a = _mm256_and_si256(level[i], low), b = _mm256_srli_epi16(level[i], 8);
    const __m256i c = _mm256_and_si256(level[i + 1], low), d = _mm256_srli_epi16(level[i + 1], 8);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const uint8_t* q = row + r * stride + 8 * i;
      const __m256i first = _mm256_add_epi32(_mm256_madd_epi16(a, broadcast4(q)),
                                             _mm256_madd_epi16(b, broadcast4(q + 4)));
      const __m256i second = _mm256_add_epi32(_mm256_madd_epi16(c, broadcast4(q + 8)),
                                              _mm256_madd_epi16(d, broadcast4(q + 12)));
      acc[r] = _mm256_add_epi32(acc[r], _mm256_add_epi32(first, second));
    }
  }
}

// The same in bytes: the levels are the unsigned operand for keys, the weights for values.
template <int kRows, int kUnits, bool kKeys>
inline void multiply_fast(const __m256i* level, const uint8_t* row, int stride, __m256i* acc) {
  const __m256i one = _mm256_set1_epi16(1);
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
    __m256i sum = _mm256_setzero_si256();
#pragma GCC unroll 4
    for (int i = 0; i < kUnits; ++i) {
      const __m256i q = broadcast4(row + r * stride + 4 * i);
      sum = _mm256_add_epi16(
          sum, kKeys ? _mm256_maddubs_epi16(level[i], q) : _mm256_maddubs_epi16(q, level[i]));
    }
    acc[r] = _mm256_add_epi32(acc[r], _mm256_madd_epi16(sum, one));
  }
}

template <int kRows, int kUnits, bool kExact, bool kKeys>
inline void multiply(const __m256i* level, const uint8_t* row, int stride, __m256i* acc) {
  if constexpr (kExact) {
    multiply_exact<kRows, kUnits>(level, row, stride, acc);
  } else {
    multiply_fast<kRows, kUnits, kKeys>(level, row, stride, acc);
  }
}

// Bytes of codes per step and half: what a step prefetches of the next tile.
constexpr int step_bytes(int bits) { return bits == 3 ? 48 : 32; }

template <int kBits, int kRows, bool kExact>
void score_rows(const uint8_t* packed, const uint8_t* next, int dim, const uint8_t* query,
                const int32_t* sums, int32_t* scores) {
  using Decode = Decoder<kBits, largest_level(kBits)>;
  const Decode decode;
  constexpr int kBytes = integer_bytes(kExact);
  const int steps = dim / 4 / Decode::kUnits;
  for (int lane = 0; lane < kTileTokens; lane += 8) {
    const int first = (lane >> 4) * steps, half = lane >> 3 & 1;
    __m256i acc[kRows];
    for (int r = 0; r < kRows; ++r) acc[r] = _mm256_set1_epi32(-largest_level(kBits) * sums[r]);
    const uint8_t* q = query;
    for (int step = first; step < first + steps; ++step, q += 4 * Decode::kUnits * kBytes) {
      prefetch(next);
      next += step_bytes(kBits);
      __m256i level[Decode::kUnits];
      decode(packed, step, half, level);
      multiply<kRows, Decode::kUnits, kExact, true>(level, q, dim * kBytes, acc);
    }
    for (int r = 0; r < kRows; ++r) store32(scores + r * kTileTokens + lane, acc[r]);
  }
}

template <int kBits, int kRows, bool kExact>
void accumulate_rows(const uint8_t* packed, const uint8_t* next, int dim, const uint8_t* weights,
                     const int32_t* sums, const float* factors, float* acc) {
  constexpr int kOffset = kExact ? largest_level(kBits) : 0, kBytes = integer_bytes(kExact);
  using Decode = Decoder<kBits, kOffset>;
  const Decode decode;
  constexpr int kSteps = kTileTokens / 4 / Decode::kUnits;
  for (int d = 0; d < dim; d += 8) {
    const int first = (d >> 4) * kSteps, half = d >> 3 & 1;
    __m256i sum[kRows];
    for (int r = 0; r < kRows; ++r) sum[r] = _mm256_set1_epi32(-kOffset * sums[r]);
    const uint8_t* w = weights;
    for (int step = first; step < first + kSteps; ++step, w += 4 * Decode::kUnits * kBytes) {
      prefetch(next);
      next += step_bytes(kBits);
      __m256i level[Decode::kUnits];
      decode(packed, step, half, level);
      multiply<kRows, Decode::kUnits, kExact, false>(level, w, kTileTokens * kBytes, sum);
    }
    for (int r = 0; r < kRows; ++r) {
      float* a = acc + r * dim + d;
      _mm256_storeu_ps(
          a, _mm256_add_ps(_mm256_loadu_ps(a),
                           _mm256_mul_ps(_mm256_cvtepi32_ps(sum[r]), _mm256_set1_ps(factors[r]))));
    }
  }
}

template <int kBits, bool kExact>
void score_all(const uint8_t* packed, const uint8_t* next, int dim, const void* query,
               const int32_t* sums, int rows, int32_t* scores) {
  for (int r = 0; r < rows; r += 4, next = packed) {
    const uint8_t* q = static_cast<const uint8_t*>(query) + r * dim * integer_bytes(kExact);
    int32_t* out = scores + r * kTileTokens;
    switch (rows - r) {
      case 1:
        score_rows<kBits, 1, kExact>(packed, next, dim, q, sums + r, out);
        break;
      case 2:
        score_rows<kBits, 2, kExact>(packed, next, dim, q, sums + r, out);
        break;
      case 3:
        score_rows<kBits, 3, kExact>(packed, next, dim, q, sums + r, out);
        break;
      default:
        score_rows<kBits, 4, kExact>(packed, next, dim, q, sums + r, out);
    }
  }
}

template <int kBits, bool kExact>
void accumulate_all(const uint8_t* packed, const uint8_t* next, int dim, const void* weights,
                    const int32_t* sums, const float* factors, int rows, float* acc) {
  for (int r = 0; r < rows; r += 4, next = packed) {
    const uint8_t* w =
        static_cast<const uint8_t*>(weights) + r * kTileTokens * integer_bytes(kExact);
    float* out = acc + r * dim;
    switch (rows - r) {
      case 1:
        accumulate_rows<kBits, 1, kExact>(packed, next, dim, w, sums + r, factors + r, out);
        break;
      case 2:
        accumulate_rows<kBits, 2, kExact>(packed, next, dim, w, sums + r, factors + r, out);
        break;
      case 3:
        accumulate_rows<kBits, 3, kExact>(packed, next, dim, w, sums + r, factors + r, out);
        break;
      default:
        accumulate_rows<kBits, 4, kExact>(packed, next, dim, w, sums + r, factors + r, out);
    }
  }
}

void score_tile(const uint8_t* codes, const uint8_t* next, int dim, int bits, const void* query,
                bool exact, const int32_t* sums, int rows, int32_t* scores) {
  using Score =
      void (*)(const uint8_t*, const uint8_t*, int, const void*, const int32_t*, int, int32_t*);
  static constexpr Score score[3][2] = {{score_all<2, false>, score_all<2, true>},
                                        {score_all<3, false>, score_all<3, true>},
                                        {score_all<4, false>, score_all<4, true>}};
  score[bits - 2][exact](codes, next, dim, query, sums, rows, scores);
}

void accumulate_tile(const uint8_t* codes, const uint8_t* next, int dim, int bits,
                     const void* weights, bool exact, const int32_t* sums, const float* units,
                     int rows, float* acc) {
  using Accumulate = void (*)(const uint8_t*, const uint8_t*, int, const void*, const int32_t*,
                              const float*, int, float*);
  static constexpr Accumulate accumulate[3][2] = {
      {accumulate_all<2, false>, accumulate_all<2, true>},
      {accumulate_all<3, false>, accumulate_all<3, true>},
      {accumulate_all<4, false>, accumulate_all<4, true>}};
  accumulate[bits - 2][exact](codes, next, dim, weights, sums, units, rows, acc);
}

void score_mean(const float* query, const int8_t* mean, float mean_scale, int dim, int rows,
                float* means) {
  alignas(32) float m[kMaxHeadDim];
  for (int d = 0; d < dim; d += 8) _mm256_store_ps(m + d, load8_s8(mean + d));
  for (int r = 0; r < rows; ++r) {
    const float* q = query + r * dim;
    __m256 lo = _mm256_setzero_ps(), hi = lo;
    for (int d = 0; d < dim; d += 16) {
      lo = _mm256_add_ps(lo, _mm256_mul_ps(_mm256_loadu_ps(q + d), _mm256_load_ps(m + d)));
      hi = _mm256_add_ps(hi, _mm256_mul_ps(_mm256_loadu_ps(q + d + 8), _mm256_load_ps(m + d + 8)));
    }
    means[r] = fold(lo, hi) * mean_scale;
  }
}

void scale_scores(const int32_t* scores, const uint16_t* key_scales, const float* units,
                  const float* means, int rows, float* out) {
  for (int t = 0; t < kTileTokens; t += 8) {
    const __m256 scale = load8(key_scales, Float::kFloat16, t);
    for (int r = 0; r < rows; ++r) {
      const int at = r * kTileTokens + t;
      const __m256 s =
          _mm256_cvtepi32_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(scores + at)));
      const __m256 step = _mm256_mul_ps(scale, _mm256_set1_ps(units[r]));
      _mm256_storeu_ps(out + at, _mm256_add_ps(_mm256_mul_ps(s, step), _mm256_set1_ps(means[r])));
    }
  }
}

inline float quantize_row(const float* p, const uint16_t* value_scales, bool exact, void* out,
                          int32_t* sum) {
  alignas(32) float u[kTileTokens];
  __m256 max = _mm256_setzero_ps();
  for (int t = 0; t < kTileTokens; t += 8) {
    const __m256 w = _mm256_loadu_ps(p + t);
    const __m256 used = _mm256_cmp_ps(w, _mm256_setzero_ps(), _CMP_GT_OQ);
    const __m256 v = _mm256_and_ps(_mm256_mul_ps(w, load8(value_scales, Float::kFloat16, t)), used);
    _mm256_store_ps(u + t, v);
    max = _mm256_max_ps(v, max);
  }
  const float most = largest(max), limit = exact ? kWeightLimitExact : kWeightLimitFast;
  const bool any = most > kSmallestMagnitude;
  *sum = store_integers(u, kTileTokens, any ? limit / most : 0.0f, exact, out);
  return any ? most / limit : 0.0f;
}

void quantize_weights(const float* p, const uint16_t* value_scales, bool exact, int rows, void* out,
                      int32_t* sums, float* units) {
  for (int r = 0; r < rows; ++r)
    units[r] =
        quantize_row(p + r * kTileTokens, value_scales, exact,
                     static_cast<uint8_t*>(out) + r * kTileTokens * integer_bytes(exact), &sums[r]);
}

}  // namespace

const PackedAttentionKernels packed_attention{quantize_query, score_tile,       score_mean,
                                              scale_scores,   quantize_weights, accumulate_tile};

}  // namespace kvq::avx2
KVQ_TARGET_END
#endif
