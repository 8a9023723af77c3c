// Attention of one query per head over float16 keys and values: what a plain kernel without
// compression can do. Nothing in it is clever, and nothing is left out that every such kernel has:
// the query heads of a KV head share each load of its keys and values, and the softmax is online.

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace {

using Half = std::uint16_t;

constexpr int kBlock = 16;    // tokens whose softmax is computed at once
constexpr int kMaxGroup = 4;  // query heads that share a pass over the tokens
constexpr float kLog2E = 1.44269504f;

#if defined(__AVX512F__)
using Vector = __m512;
inline Vector zero() { return _mm512_setzero_ps(); }
inline Vector splat(float x) { return _mm512_set1_ps(x); }
inline Vector load(const float* x) { return _mm512_loadu_ps(x); }
inline void store(float* x, Vector v) { _mm512_storeu_ps(x, v); }
inline Vector fma(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
inline float sum(Vector v) { return _mm512_reduce_add_ps(v); }
inline Vector widen(const Half* x) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
}
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
using Vector = __m256;
inline Vector zero() { return _mm256_setzero_ps(); }
inline Vector splat(float x) { return _mm256_set1_ps(x); }
inline Vector load(const float* x) { return _mm256_loadu_ps(x); }
inline void store(float* x, Vector v) { _mm256_storeu_ps(x, v); }
inline Vector fma(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
inline float sum(Vector v) {
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
inline Vector widen(const Half* x) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
}
#else
#error "needs AVX-512, or AVX2 with FMA and F16C"
#endif

constexpr int kLanes = sizeof(Vector) / sizeof(float);
constexpr int kStrip = 4;  // vectors of an output that stay in registers

// 2^x for x <= 0, to float16's accuracy; without branches, for the compiler to vectorise.
inline float exp2_negative(float x) {
  x = std::max(x, -126.0f);
  const float whole = std::nearbyint(x);
  const float r = x - whole;
  float p = 0.0096181f;
  p = p * r + 0.0555041f;
  p = p * r + 0.2402265f;
  p = p * r + 0.6931472f;
  p = p * r + 1.0f;
  const std::int32_t bits = (static_cast<std::int32_t>(whole) + 127) << 23;
  float power;
  __builtin_memcpy(&power, &bits, sizeof power);
  return p * power;
}

template <int kDim, int kGroup>
struct Attention {
  alignas(64) float query[kGroup][kDim];
  alignas(64) float out[kGroup][kDim] = {};
  alignas(64) float weights[kGroup][kBlock];
  float maximum[kGroup];
  float total[kGroup] = {};

  Attention(const Half* x, float scale) {
    for (int g = 0; g < kGroup; ++g) {
      maximum[g] = -INFINITY;
      for (int d = 0; d < kDim; ++d) query[g][d] = _cvtsh_ss(x[g * kDim + d]) * scale;
    }
  }

  void score(const Half* key, int tokens) {
    for (int t = 0; t < tokens; ++t, key += kDim) {
      Vector dot[kGroup];
#pragma GCC unroll 4
      for (int g = 0; g < kGroup; ++g) dot[g] = zero();
#pragma GCC unroll 8
      for (int d = 0; d < kDim; d += kLanes) {
        const Vector k = widen(key + d);
#pragma GCC unroll 4
        for (int g = 0; g < kGroup; ++g) dot[g] = fma(k, load(query[g] + d), dot[g]);
      }
#pragma GCC unroll 4
      for (int g = 0; g < kGroup; ++g) weights[g][t] = sum(dot[g]);
    }
  }

  void softmax(int tokens) {
    for (int g = 0; g < kGroup; ++g) {
      float* w = weights[g];
      for (int t = tokens; t < kBlock; ++t) w[t] = -INFINITY;
      float highest = maximum[g];
      for (int t = 0; t < kBlock; ++t) highest = std::max(highest, w[t]);
      if (highest > maximum[g]) {
        const float shrink = exp2_negative(maximum[g] - highest);
        maximum[g] = highest;
        total[g] *= shrink;
        for (int d = 0; d < kDim; ++d) out[g][d] *= shrink;
      }
      for (int t = 0; t < kBlock; ++t) w[t] = exp2_negative(w[t] - highest);
      for (int t = 0; t < tokens; ++t) total[g] += w[t];
    }
  }

  void accumulate(const Half* value, int tokens) {
    for (int d = 0; d < kDim; d += kStrip * kLanes) {
      Vector sums[kGroup][kStrip];
#pragma GCC unroll 4
      for (int g = 0; g < kGroup; ++g)
#pragma GCC unroll 4
        for (int i = 0; i < kStrip; ++i) sums[g][i] = load(out[g] + d + i * kLanes);
      for (int t = 0; t < tokens; ++t) {
#pragma GCC unroll 4
        for (int i = 0; i < kStrip; ++i) {
          const Vector v = widen(value + t * kDim + d + i * kLanes);
#pragma GCC unroll 4
          for (int g = 0; g < kGroup; ++g) sums[g][i] = fma(v, splat(weights[g][t]), sums[g][i]);
        }
      }
#pragma GCC unroll 4
      for (int g = 0; g < kGroup; ++g)
#pragma GCC unroll 4
        for (int i = 0; i < kStrip; ++i) store(out[g] + d + i * kLanes, sums[g][i]);
    }
  }

  void write(float* to) const {
    for (int g = 0; g < kGroup; ++g)
      for (int d = 0; d < kDim; ++d) to[g * kDim + d] = out[g][d] / total[g];
  }
};

template <int kDim, int kGroup>
void attend(const Half* query, const Half* key, const Half* value, float* out, std::int64_t tokens,
            float scale) {
  Attention<kDim, kGroup> attention(query, scale);
  for (std::int64_t first = 0; first < tokens; first += kBlock) {
    const int count = static_cast<int>(std::min<std::int64_t>(kBlock, tokens - first));
    attention.score(key + first * kDim, count);
    attention.softmax(count);
    attention.accumulate(value + first * kDim, count);
  }
  attention.write(out);
}

template <int kDim>
void attend_group(int group, const Half* query, const Half* key, const Half* value, float* out,
                  std::int64_t tokens, float scale) {
  for (int g = 0; g < group; g += kMaxGroup, query += kMaxGroup * kDim, out += kMaxGroup * kDim) {
    switch (std::min(group - g, kMaxGroup)) {
      case 1:
        attend<kDim, 1>(query, key, value, out, tokens, scale);
        break;
      case 2:
        attend<kDim, 2>(query, key, value, out, tokens, scale);
        break;
      case 3:
        attend<kDim, 3>(query, key, value, out, tokens, scale);
        break;
      default:
        attend<kDim, 4>(query, key, value, out, tokens, scale);
    }
  }
}

}  // namespace

// query and out: [heads, dim]; key and value: [kv_heads, tokens, dim]. Returns 0, or 1 for a dim
// that it has not.
extern "C" int fp16_attention(const Half* query, const Half* key, const Half* value, float* out,
                              int heads, int kv_heads, int dim, std::int64_t tokens) {
  if (dim != 64 && dim != 128) return 1;
  const auto run = dim == 64 ? attend_group<64> : attend_group<128>;
  const int group = heads / kv_heads;
  const float scale = kLog2E / std::sqrt(static_cast<float>(dim));
  for (std::int64_t head = 0; head < kv_heads; ++head) {
    const std::int64_t rows = head * group * dim;
    const std::int64_t tensor = head * tokens * dim;
    run(group, query + rows, key + tensor, value + tensor, out + rows, tokens, scale);
  }
  return 0;
}
