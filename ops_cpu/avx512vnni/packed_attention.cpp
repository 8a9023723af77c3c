#if defined(__x86_64__)
#include <immintrin.h>

#include <cstring>

#include "ops_cpu/exp2.h"
#include "ops_cpu/kernels.h"
#include "ops_cpu/region.h"

KVQ_TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512vbmi,avx2,f16c")
#include "ops_cpu/avx512vnni/decode.h"
#include "ops_cpu/avx512vnni/lanes.h"

namespace kvq::avx512vnni {
namespace {

// Largest level, added to the levels of keys to make them unsigned bytes.
constexpr int largest_level(int bits) { return bits == 4 ? 63 : bits == 3 ? 31 : 10; }

// vpdpbusd adds four byte products to 32 bits, so nothing saturates. Exact integers are two 7-bit
// planes, the low and the high bytes of four elements side by side.
constexpr int planes_of(bool exact) { return exact ? 2 : 1; }

inline __m512i broadcast4(const void* p) {
  int32_t word;
  std::memcpy(&word, p, 4);
  return _mm512_set1_epi32(word);
}

// x * inverse rounded, 16 integers at a time; returns their sum. kCarry is what the low plane's
// range is centred by: 64 for signed bytes, 0 for unsigned ones.
template <int kCarry>
int32_t store_integers(const float* x, int count, float inverse, bool exact, void* out) {
  const __m512 factor = _mm512_set1_ps(inverse);
  __m512i total = _mm512_setzero_si512();
  auto* bytes = static_cast<uint8_t*>(out);
  for (int d = 0; d < count; d += 16) {
    const __m512i v = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + d), factor));
    total = _mm512_add_epi32(total, v);
    if (!exact) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(bytes + d), _mm512_cvtepi32_epi8(v));
      continue;
    }
    const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(v, _mm512_set1_epi32(kCarry)), 7);
    const __m512i low = _mm512_sub_epi32(v, _mm512_slli_epi32(high, 7));
    const __m128i l = _mm512_cvtepi32_epi8(low), h = _mm512_cvtepi32_epi8(high);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(bytes + 2 * d), _mm_unpacklo_epi32(l, h));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(bytes + 2 * d + 16), _mm_unpackhi_epi32(l, h));
  }
  return _mm512_reduce_add_epi32(total);
}

void quantize_query(const float* x, int dim, bool exact, void* out, int32_t* sum, float* unit) {
  __m512 max = _mm512_setzero_ps();
  for (int d = 0; d < dim; d += 16) max = _mm512_max_ps(_mm512_abs_ps(_mm512_loadu_ps(x + d)), max);
  const float most = _mm512_reduce_max_ps(max);
  const float limit = exact ? kQueryLimitExact : kQueryLimitFast;
  *unit = most / limit;
  *sum = store_integers<64>(x, dim, most > kSmallestMagnitude ? limit / most : 0.0f, exact, out);
}

// Sums of one plane of one row. A chain of dot products is as long as their latency, so that few
// rows take turns between several sums.
template <int kRows>
constexpr int sums_of() {
  return kRows <= 2 ? 4 : kRows <= 4 ? 2 : 1;
}

template <int kRows, int kPlanes>
struct Sums {
  static constexpr int kSums = sums_of<kRows>();
  __m512i v[kRows][kPlanes][kSums];

  inline void clear() {
    for (auto& row : v)
      for (auto& plane : row)
        for (auto& sum : plane) sum = _mm512_setzero_si512();
  }
  inline __m512i total(int r) const {
    __m512i plane[kPlanes];
    for (int p = 0; p < kPlanes; ++p) {
      plane[p] = v[r][p][0];
      for (int i = 1; i < kSums; ++i) plane[p] = _mm512_add_epi32(plane[p], v[r][p][i]);
    }
    if constexpr (kPlanes == 2) return _mm512_add_epi32(plane[0], _mm512_slli_epi32(plane[1], 7));
    return plane[0];
  }
};

// Adds the products of one decoder step; `row` is the first row's integers of the first unit and
// `stride` the bytes between rows. Levels are the unsigned operand for keys, weights for values.
template <int kRows, int kPlanes, int kUnits, bool kKeys>
inline void multiply(const __m512i* level, const uint8_t* row, int stride,
                     Sums<kRows, kPlanes>& sums) {
#pragma GCC unroll 4
  for (int u = 0; u < kUnits; ++u)
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
      for (int p = 0; p < kPlanes; ++p) {
        const __m512i q = broadcast4(row + r * stride + 4 * (u * kPlanes + p));
        __m512i& sum = sums.v[r][p][u % Sums<kRows, kPlanes>::kSums];
        sum = kKeys ? _mm512_dpbusd_epi32(sum, level[u], q) : _mm512_dpbusd_epi32(sum, q, level[u]);
      }
}

// Prefetch the codes of one step: a line, or the one and a half of 3 bits. Returns those of the
// next.
template <int kBits>
inline const uint8_t* prefetch_step(const uint8_t* p) {
  prefetch(p);
  if constexpr (kBits == 3) prefetch(p + 64);
  return p + (kBits == 3 ? 96 : 64);
}

template <int kBits, int kRows, bool kExact>
void score_rows(const uint8_t* packed, const uint8_t* next, int dim, const uint8_t* query,
                const int32_t* sums, int32_t* scores) {
  constexpr int kPlanes = planes_of(kExact);
  using Decode = Decoder<kBits, largest_level(kBits)>;
  const Decode decode;
  const int steps = dim / 4 / Decode::kUnits;
  for (int group = 0; group < kTileTokens / 16; ++group) {
    Sums<kRows, kPlanes> acc;
    acc.clear();
    const uint8_t* q = query;
    for (int step = group * steps; step < (group + 1) * steps; ++step) {
      next = prefetch_step<kBits>(next);
      __m512i level[Decode::kUnits];
      decode(packed, step, level);
      multiply<kRows, kPlanes, Decode::kUnits, true>(level, q, dim * kPlanes, acc);
      q += 4 * Decode::kUnits * kPlanes;
    }
    for (int r = 0; r < kRows; ++r)
      _mm512_storeu_si512(
          scores + r * kTileTokens + 16 * group,
          _mm512_sub_epi32(acc.total(r), _mm512_set1_epi32(largest_level(kBits) * sums[r])));
  }
}

template <int kBits, int kRows, bool kExact>
void accumulate_rows(const uint8_t* packed, const uint8_t* next, int dim, const uint8_t* weights,
                     const float* factors, float* acc) {
  constexpr int kPlanes = planes_of(kExact);
  using Decode = Decoder<kBits, 0>;
  const Decode decode;
  constexpr int kSteps = kTileTokens / 4 / Decode::kUnits;
  for (int block = 0; block < dim / 16; ++block) {
    Sums<kRows, kPlanes> sums;
    sums.clear();
#pragma GCC unroll 8
    for (int step = 0; step < kSteps; ++step) {
      next = prefetch_step<kBits>(next);
      __m512i level[Decode::kUnits];
      decode(packed, block * kSteps + step, level);
      multiply<kRows, kPlanes, Decode::kUnits, false>(
          level, weights + 4 * Decode::kUnits * kPlanes * step, kTileTokens * kPlanes, sums);
    }
    for (int r = 0; r < kRows; ++r) {
      float* a = acc + r * dim + 16 * block;
      _mm512_storeu_ps(
          a, _mm512_add_ps(_mm512_loadu_ps(a), _mm512_mul_ps(_mm512_cvtepi32_ps(sums.total(r)),
                                                             _mm512_set1_ps(factors[r]))));
    }
  }
}

constexpr int kBlock = 8;  // rows that share one decoding

template <int kBits, bool kExact, int kRows = kBlock>
void score_block(int rows, const uint8_t* packed, const uint8_t* next, int dim,
                 const uint8_t* query, const int32_t* sums, int32_t* scores) {
  if (rows == kRows) {
    score_rows<kBits, kRows, kExact>(packed, next, dim, query, sums, scores);
  } else if constexpr (kRows > 1) {
    score_block<kBits, kExact, kRows - 1>(rows, packed, next, dim, query, sums, scores);
  }
}

template <int kBits, bool kExact, int kRows = kBlock>
void accumulate_block(int rows, const uint8_t* packed, const uint8_t* next, int dim,
                      const uint8_t* weights, const float* factors, float* acc) {
  if (rows == kRows) {
    accumulate_rows<kBits, kRows, kExact>(packed, next, dim, weights, factors, acc);
  } else if constexpr (kRows > 1) {
    accumulate_block<kBits, kExact, kRows - 1>(rows, packed, next, dim, weights, factors, acc);
  }
}

inline int block_rows(int rows) { return rows < kBlock ? rows : kBlock; }

void score_tile(const uint8_t* codes, const uint8_t* next, int dim, int bits, const void* query,
                bool exact, const int32_t* sums, int rows, int32_t* scores) {
  using Score =
      void (*)(int, const uint8_t*, const uint8_t*, int, const uint8_t*, const int32_t*, int32_t*);
  static constexpr Score score[3][2] = {{score_block<2, false>, score_block<2, true>},
                                        {score_block<3, false>, score_block<3, true>},
                                        {score_block<4, false>, score_block<4, true>}};
  const auto* q = static_cast<const uint8_t*>(query);
  for (int r = 0; r < rows; r += kBlock, next = codes)
    score[bits - 2][exact](block_rows(rows - r), codes, next, dim,
                           q + r * dim * integer_bytes(exact), sums + r, scores + r * kTileTokens);
}

void accumulate_tile(const uint8_t* codes, const uint8_t* next, int dim, int bits,
                     const void* weights, bool exact, const int32_t*, const float* units, int rows,
                     float* acc) {
  using Accumulate =
      void (*)(int, const uint8_t*, const uint8_t*, int, const uint8_t*, const float*, float*);
  static constexpr Accumulate accumulate[3][2] = {
      {accumulate_block<2, false>, accumulate_block<2, true>},
      {accumulate_block<3, false>, accumulate_block<3, true>},
      {accumulate_block<4, false>, accumulate_block<4, true>}};
  const auto* w = static_cast<const uint8_t*>(weights);
  for (int r = 0; r < rows; r += kBlock, next = codes)
    accumulate[bits - 2][exact](block_rows(rows - r), codes, next, dim,
                                w + r * kTileTokens * integer_bytes(exact), units + r,
                                acc + r * dim);
}

void score_mean(const float* query, const int8_t* mean, float mean_scale, int dim, int rows,
                float* means) {
  alignas(64) float m[kMaxHeadDim];
  for (int d = 0; d < dim; d += 16) _mm512_store_ps(m + d, load16_s8(mean + d));
  for (int r = 0; r < rows; ++r) {
    const float* q = query + r * dim;
    __m512 sum = _mm512_setzero_ps();
    for (int d = 0; d < dim; d += 16)
      sum = _mm512_add_ps(sum, _mm512_mul_ps(_mm512_loadu_ps(q + d), _mm512_load_ps(m + d)));
    means[r] = fold(sum) * mean_scale;
  }
}

void scale_scores(const int32_t* scores, const uint16_t* key_scales, const float* units,
                  const float* means, int rows, float* out) {
  for (int t = 0; t < kTileTokens; t += 16) {
    const __m512 scale = load16(key_scales, Float::kFloat16, t);
    for (int r = 0; r < rows; ++r) {
      const int at = r * kTileTokens + t;
      const __m512 s = _mm512_cvtepi32_ps(_mm512_loadu_si512(scores + at));
      const __m512 step = _mm512_mul_ps(scale, _mm512_set1_ps(units[r]));
      _mm512_storeu_ps(out + at, _mm512_add_ps(_mm512_mul_ps(s, step), _mm512_set1_ps(means[r])));
    }
  }
}

inline float quantize_row(const float* p, const uint16_t* value_scales, bool exact, void* out,
                          int32_t* sum) {
  alignas(64) float u[kTileTokens];
  __m512 max = _mm512_setzero_ps();
  for (int t = 0; t < kTileTokens; t += 16) {
    const __m512 w = _mm512_loadu_ps(p + t);
    const __mmask16 used = _mm512_cmp_ps_mask(w, _mm512_setzero_ps(), _CMP_GT_OQ);
    const __m512 v = _mm512_maskz_mul_ps(used, w, load16(value_scales, Float::kFloat16, t));
    _mm512_store_ps(u + t, v);
    max = _mm512_max_ps(v, max);
  }
  const float most = _mm512_reduce_max_ps(max);
  const float limit = exact ? kWeightLimitExact : kWeightLimitFast;
  const bool any = most > kSmallestMagnitude;
  *sum = store_integers<0>(u, kTileTokens, any ? limit / most : 0.0f, exact, out);
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

}  // namespace kvq::avx512vnni
KVQ_TARGET_END
#endif
