#if defined(__x86_64__)
#include <immintrin.h>

#include <algorithm>
#include <cstring>
#include <utility>

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

void quantize_query(const float* x, int dim, bool exact, void* out, int32_t* sum, float* unit) {
  __m512 max = _mm512_setzero_ps();
  for (int d = 0; d < dim; d += 16) max = _mm512_max_ps(_mm512_abs_ps(_mm512_loadu_ps(x + d)), max);
  const float most = _mm512_reduce_max_ps(max);
  const float limit = exact ? kQueryLimitExact : kQueryLimitFast;
  const __m512 inverse = _mm512_set1_ps(most > kSmallestMagnitude ? limit / most : 0.0f);
  __m512i total = _mm512_setzero_si512();
  auto* bytes = static_cast<uint8_t*>(out);
  for (int d = 0; d < dim; d += 16) {
    const __m512i v = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + d), inverse));
    total = _mm512_add_epi32(total, v);
    if (!exact) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(bytes + d), _mm512_cvtepi32_epi8(v));
      continue;
    }
    const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(v, _mm512_set1_epi32(64)), 7);
    const __m512i low = _mm512_sub_epi32(v, _mm512_slli_epi32(high, 7));
    const __m128i l = _mm512_cvtepi32_epi8(low), h = _mm512_cvtepi32_epi8(high);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(bytes + 2 * d), _mm_unpacklo_epi32(l, h));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(bytes + 2 * d + 16), _mm_unpackhi_epi32(l, h));
  }
  *sum = _mm512_reduce_add_epi32(total);
  *unit = most / limit;
}

// Groups of 16 tokens, or blocks of 16 channels, that share a broadcast of the other operand:
// without them the loads would be the limit, and not the products.
constexpr int groups_of(int chains) { return chains <= 4 ? 4 : chains <= 8 ? 2 : 1; }

// Calls f with 0 to kCount - 1 as constants: indices that no loop has to be unrolled for, or arrays
// of registers would live in memory.
template <int... kIndex, class F>
KVQ_ALWAYS_INLINE inline void for_each_index(std::integer_sequence<int, kIndex...>, F f) {
  (f(std::integral_constant<int, kIndex>()), ...);
}
template <int kCount, class F>
KVQ_ALWAYS_INLINE inline void for_each_of(F f) {
  for_each_index(std::make_integer_sequence<int, kCount>(), f);
}

// Products of the same query or weights with several groups. A chain of dot products is as long as
// their latency, so that one row takes turns between two sums.
template <int kRows, int kPlanes, int kGroups>
struct Sums {
  static constexpr int kSums = kRows * kPlanes * kGroups < 8 ? 2 : 1;
  __m512i v[kGroups * kRows * kPlanes * kSums];

  static constexpr int at(int g, int r, int p, int i) {
    return ((g * kRows + r) * kPlanes + p) * kSums + i;
  }
  KVQ_ALWAYS_INLINE void clear() {
    for_each_of<kGroups * kRows * kPlanes * kSums>(
        [&](auto i) KVQ_ALWAYS_INLINE { v[i] = _mm512_setzero_si512(); });
  }
  KVQ_ALWAYS_INLINE __m512i plane(int g, int r, int p) const {
    const __m512i first = v[at(g, r, p, 0)];
    return kSums == 2 ? _mm512_add_epi32(first, v[at(g, r, p, kSums - 1)]) : first;
  }
  KVQ_ALWAYS_INLINE __m512i total(int g, int r) const {
    const __m512i low = plane(g, r, 0);
    if constexpr (kPlanes == 1) return low;
    return _mm512_add_epi32(low, _mm512_slli_epi32(plane(g, r, kPlanes - 1), 7));
  }
};

// Adds the products of one decoder step of every group; `row` is the first row's integers of the
// first unit and `stride` the bytes between rows. Levels are the unsigned operand for keys, weights
// for values.
template <bool kKeys, int kUnits, int kRows, int kPlanes, int kGroups>
inline void multiply(const __m512i* level, const uint8_t* row, int stride,
                     Sums<kRows, kPlanes, kGroups>& sums) {
  using S = Sums<kRows, kPlanes, kGroups>;
  for_each_of<kUnits>([&](auto u) KVQ_ALWAYS_INLINE {
    for_each_of<kRows>([&](auto r) KVQ_ALWAYS_INLINE {
      for_each_of<kPlanes>([&](auto p) KVQ_ALWAYS_INLINE {
        const __m512i q = broadcast4(row + r * stride + 4 * (u * kPlanes + p));
        for_each_of<kGroups>([&](auto g) KVQ_ALWAYS_INLINE {
          __m512i& sum = sums.v[S::at(g, r, p, u % S::kSums)];
          const __m512i x = level[g * kUnits + u];
          sum = kKeys ? _mm512_dpbusd_epi32(sum, x, q) : _mm512_dpbusd_epi32(sum, q, x);
        });
      });
    });
  });
}

// Prefetch the codes of one step: a line, or the one and a half of 3 bits. Returns those of the
// next.
template <int kBits>
inline const uint8_t* prefetch_step(const uint8_t* p) {
  prefetch(p);
  if constexpr (kBits == 3) prefetch(p + 64);
  return p + (kBits == 3 ? 96 : 64);
}

// The products of kGroups groups of `steps` decoder steps each, the first of them step `first`.
template <bool kKeys, class Decode, int kRows, int kPlanes, int kGroups>
inline void multiply_groups(const Decode& decode, const uint8_t* packed, int first, int steps,
                            const uint8_t* row, int stride, const uint8_t*& next,
                            Sums<kRows, kPlanes, kGroups>& sums) {
  sums.clear();
  for (int step = first; step < first + steps; ++step) {
    __m512i level[kGroups * Decode::kUnits];
    for_each_of<kGroups>([&](auto g) KVQ_ALWAYS_INLINE {
      next = prefetch_step<Decode::kBits>(next);
      decode(packed, step + g * steps, level + g * Decode::kUnits);
    });
    multiply<kKeys, Decode::kUnits>(level, row, stride, sums);
    row += 4 * Decode::kUnits * kPlanes;
  }
}

template <int kBits, int kRows, bool kExact>
void score_rows(const uint8_t* packed, const uint8_t* next, int dim, const uint8_t* query,
                const int32_t* query_sums, int32_t* scores) {
  constexpr int kPlanes = planes_of(kExact), kGroups = groups_of(kRows * kPlanes);
  using Decode = Decoder<kBits, largest_level(kBits)>;
  const Decode decode;
  const int steps = dim / 4 / Decode::kUnits;
  for (int group = 0; group < kTileTokens / 16; group += kGroups) {
    Sums<kRows, kPlanes, kGroups> sums;
    multiply_groups<true>(decode, packed, group * steps, steps, query, dim * kPlanes, next, sums);
    for_each_of<kRows>([&](auto r) KVQ_ALWAYS_INLINE {
      const __m512i offset = _mm512_set1_epi32(largest_level(kBits) * query_sums[r]);
      for_each_of<kGroups>([&](auto g) KVQ_ALWAYS_INLINE {
        _mm512_storeu_si512(scores + r * kTileTokens + 16 * (group + g),
                            _mm512_sub_epi32(sums.total(g, r), offset));
      });
    });
  }
}

// acc[rows, 16 channels of kGroups blocks] += factor * products.
template <int kBits, int kRows, bool kExact, int kGroups>
inline void accumulate_blocks(const Decoder<kBits, 0>& decode, const uint8_t* packed, int block,
                              const uint8_t* weights, const float* factors, int dim, float* acc,
                              const uint8_t*& next) {
  constexpr int kPlanes = planes_of(kExact), kSteps = kTileTokens / 4 / Decoder<kBits, 0>::kUnits;
  Sums<kRows, kPlanes, kGroups> sums;
  multiply_groups<false>(decode, packed, block * kSteps, kSteps, weights, kTileTokens * kPlanes,
                         next, sums);
  for_each_of<kRows>([&](auto r) KVQ_ALWAYS_INLINE {
    const __m512 factor = _mm512_set1_ps(factors[r]);
    for_each_of<kGroups>([&](auto g) KVQ_ALWAYS_INLINE {
      float* a = acc + r * dim + 16 * (block + g);
      const __m512 sum = _mm512_cvtepi32_ps(sums.total(g, r));
      _mm512_storeu_ps(a, _mm512_add_ps(_mm512_loadu_ps(a), _mm512_mul_ps(sum, factor)));
    });
  });
}

template <int kBits, int kRows, bool kExact>
void accumulate_rows(const uint8_t* packed, const uint8_t* next, int dim, const uint8_t* weights,
                     const float* factors, float* acc) {
  constexpr int kGroups = groups_of(kRows * planes_of(kExact));
  const Decoder<kBits, 0> decode;
  int block = 0;
  for (; block + kGroups <= dim / 16; block += kGroups)
    accumulate_blocks<kBits, kRows, kExact, kGroups>(decode, packed, block, weights, factors, dim,
                                                     acc, next);
  for (; block < dim / 16; ++block)
    accumulate_blocks<kBits, kRows, kExact, 1>(decode, packed, block, weights, factors, dim, acc,
                                               next);
}

// Rows that share one decoding: what leaves registers for two groups.
constexpr int block_of(bool exact) { return 8 / planes_of(exact); }

template <int kBits, bool kExact, int kRows = block_of(kExact)>
void score_block(int rows, const uint8_t* packed, const uint8_t* next, int dim,
                 const uint8_t* query, const int32_t* sums, int32_t* scores) {
  if (rows >= kRows) {
    score_rows<kBits, kRows, kExact>(packed, next, dim, query, sums, scores);
  } else if constexpr (kRows > 1) {
    score_block<kBits, kExact, kRows - 1>(rows, packed, next, dim, query, sums, scores);
  }
}

template <int kBits, bool kExact, int kRows = block_of(kExact)>
void accumulate_block(int rows, const uint8_t* packed, const uint8_t* next, int dim,
                      const uint8_t* weights, const float* factors, float* acc) {
  if (rows >= kRows) {
    accumulate_rows<kBits, kRows, kExact>(packed, next, dim, weights, factors, acc);
  } else if constexpr (kRows > 1) {
    accumulate_block<kBits, kExact, kRows - 1>(rows, packed, next, dim, weights, factors, acc);
  }
}

void score_tile(const uint8_t* codes, const uint8_t* next, int dim, int bits, const void* query,
                bool exact, const int32_t* sums, int rows, int32_t* scores) {
  using Score =
      void (*)(int, const uint8_t*, const uint8_t*, int, const uint8_t*, const int32_t*, int32_t*);
  static constexpr Score score[3][2] = {{score_block<2, false>, score_block<2, true>},
                                        {score_block<3, false>, score_block<3, true>},
                                        {score_block<4, false>, score_block<4, true>}};
  const auto* q = static_cast<const uint8_t*>(query);
  for (int r = 0; r < rows; r += block_of(exact), next = codes)
    score[bits - 2][exact](rows - r, codes, next, dim, q + r * dim * integer_bytes(exact), sums + r,
                           scores + r * kTileTokens);
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
  for (int r = 0; r < rows; r += block_of(exact), next = codes)
    accumulate[bits - 2][exact](rows - r, codes, next, dim,
                                w + r * kTileTokens * integer_bytes(exact), units + r,
                                acc + r * dim);
}

void score_mean(const float* query, const int8_t* mean, float mean_scale, int dim, int rows,
                float* means) {
  for (int r = 0; r < rows; r += 4) {
    __m512 sum[4];
    const float* q[4];
    for (int i = 0; i < 4; ++i) {
      sum[i] = _mm512_setzero_ps();
      q[i] = query + std::min(r + i, rows - 1) * dim;
    }
    for (int d = 0; d < dim; d += 16) {
      const __m512 m = load16_s8(mean + d);
      for (int i = 0; i < 4; ++i)
        sum[i] = _mm512_add_ps(sum[i], _mm512_mul_ps(_mm512_loadu_ps(q[i] + d), m));
    }
    alignas(16) float mean_of[4];
    _mm_store_ps(mean_of, _mm_mul_ps(fold4(sum), _mm_set1_ps(mean_scale)));
    for (int i = 0; i < 4 && r + i < rows; ++i) means[r + i] = mean_of[i];
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

// Bytes of 64 weights in two planes: four low halves, then the four high ones.
struct PlaneOrder {
  alignas(64) uint8_t byte[64];
  constexpr PlaneOrder() : byte() {
    // A pack leaves four tokens of its first operand and four of its second in each 16 bytes, the
    // halves of a token side by side.
    for (int i = 0; i < 64; ++i) {
      const int quad = i / 8, half = i / 4 % 2, token = i % 4;
      byte[i] = static_cast<uint8_t>(16 * (quad % 4) + 8 * (quad / 4) + 2 * token + half);
    }
  }
};

// The low and high 7 bits of two times 16 weights.
inline __m512i weight_planes(__m512i a, __m512i b, __m512i order) {
  const __m512i w = _mm512_packus_epi32(a, b);
  const __m512i high = _mm512_and_si512(w, _mm512_set1_epi16(0x3F80));
  return _mm512_permutexvar_epi8(order, _mm512_add_epi16(w, high));
}

void store_weights(const __m512i* w, bool exact, void* out) {
  if (exact) {
    static constexpr PlaneOrder planes;
    const __m512i order = _mm512_load_si512(planes.byte);
    _mm512_storeu_si512(out, weight_planes(w[0], w[1], order));
    _mm512_storeu_si512(static_cast<uint8_t*>(out) + 64, weight_planes(w[2], w[3], order));
    return;
  }
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m512i bytes =
      _mm512_packus_epi16(_mm512_packus_epi32(w[0], w[1]), _mm512_packus_epi32(w[2], w[3]));
  _mm512_storeu_si512(out, _mm512_permutexvar_epi32(order, bytes));
}

inline float quantize_row(const float* p, const __m512* scales, bool exact, void* out,
                          int32_t* sum) {
  __m512 u[4], max = _mm512_setzero_ps();
  for (int i = 0; i < 4; ++i) {
    const __m512 w = _mm512_loadu_ps(p + 16 * i);
    const __mmask16 used = _mm512_cmp_ps_mask(w, _mm512_setzero_ps(), _CMP_GT_OQ);
    u[i] = _mm512_maskz_mul_ps(used, w, scales[i]);
    max = _mm512_max_ps(u[i], max);
  }
  const float most = _mm512_reduce_max_ps(max);
  const float limit = exact ? kWeightLimitExact : kWeightLimitFast;
  const bool any = most > kSmallestMagnitude;
  const __m512 inverse = _mm512_set1_ps(any ? limit / most : 0.0f);
  __m512i integers[4];
  for (int i = 0; i < 4; ++i) integers[i] = _mm512_cvtps_epi32(_mm512_mul_ps(u[i], inverse));
  *sum = _mm512_reduce_add_epi32(_mm512_add_epi32(_mm512_add_epi32(integers[0], integers[1]),
                                                  _mm512_add_epi32(integers[2], integers[3])));
  store_weights(integers, exact, out);
  return any ? most / limit : 0.0f;
}

void quantize_weights(const float* p, const uint16_t* value_scales, bool exact, int rows, void* out,
                      int32_t* sums, float* units) {
  __m512 scales[4];
  for (int i = 0; i < 4; ++i) scales[i] = load16(value_scales, Float::kFloat16, 16 * i);
  auto* bytes = static_cast<uint8_t*>(out);
  for (int r = 0; r < rows; ++r)
    units[r] = quantize_row(p + r * kTileTokens, scales, exact,
                            bytes + r * kTileTokens * integer_bytes(exact), sums + r);
}

}  // namespace

const PackedAttentionKernels packed_attention{quantize_query, score_tile,       score_mean,
                                              scale_scores,   quantize_weights, accumulate_tile};

}  // namespace kvq::avx512vnni
KVQ_TARGET_END
#endif
