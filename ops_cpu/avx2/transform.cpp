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

void load(const void* in, Float type, float* out, int64_t count) {
  const int64_t whole = count / 8 * 8;
  for (int64_t i = 0; i < whole; i += 8) _mm256_storeu_ps(out + i, load8(in, type, i));
  if (whole < count)
    scalar::transform.load(static_cast<const uint8_t*>(in) + whole * size_of(type), type,
                           out + whole, count - whole);
}

void load_bounded(const void* in, Float type, float* out, int dim) {
  const __m256 most = _mm256_set1_ps(kLargestInput), least = _mm256_set1_ps(-kLargestInput);
  for (int d = 0; d < dim; d += 8) {
    const __m256 x = load8(in, type, d);
    const __m256 number = _mm256_and_ps(x, _mm256_cmp_ps(x, x, _CMP_ORD_Q));
    _mm256_storeu_ps(out + d, _mm256_max_ps(_mm256_min_ps(number, most), least));
  }
}

// As float_to_bfloat, in the low halves of the lanes.
inline __m256i to_bfloat(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x), high = _mm256_srli_epi32(bits, 16);
  const __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_srli_epi32(
      _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF))), 16);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(rounded, _mm256_or_si256(high, _mm256_set1_epi32(0x40)), nan);
}

void store(const float* in, void* out, Float type, int64_t count) {
  if (type == Float::kFloat32) {
    std::memcpy(out, in, count * sizeof(float));
    return;
  }
  int64_t i = 0;
  if (type == Float::kFloat16)
    for (; i + 8 <= count; i += 8)
      _mm_storeu_si128(reinterpret_cast<__m128i*>(static_cast<uint16_t*>(out) + i),
                       _mm256_cvtps_ph(_mm256_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT));
  else
    for (; i + 16 <= count; i += 16) {
      const __m256i words = _mm256_packus_epi32(to_bfloat(_mm256_loadu_ps(in + i)),
                                                to_bfloat(_mm256_loadu_ps(in + i + 8)));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(static_cast<uint16_t*>(out) + i),
                          _mm256_permute4x64_epi64(words, 0xD8));
    }
  scalar::transform.store(in + i, static_cast<uint16_t*>(out) + i, type, count - i);
}

// Butterflies of distance 1 and 2 (and 4 when `length` reaches 8) stay inside a register.
inline __m256 butterfly_in_register(__m256 x, int length) {
  const __m256 odd = _mm256_castsi256_ps(
      _mm256_setr_epi32(0, INT32_MIN, 0, INT32_MIN, 0, INT32_MIN, 0, INT32_MIN));
  const __m256 upper = _mm256_castsi256_ps(
      _mm256_setr_epi32(0, 0, INT32_MIN, INT32_MIN, 0, 0, INT32_MIN, INT32_MIN));
  x = _mm256_add_ps(_mm256_permute_ps(x, 0xB1), _mm256_xor_ps(x, odd));
  x = _mm256_add_ps(_mm256_permute_ps(x, 0x4E), _mm256_xor_ps(x, upper));
  if (length < 8) return x;
  const __m256 high = _mm256_castsi256_ps(
      _mm256_setr_epi32(0, 0, 0, 0, INT32_MIN, INT32_MIN, INT32_MIN, INT32_MIN));
  return _mm256_add_ps(_mm256_permute2f128_ps(x, x, 1), _mm256_xor_ps(x, high));
}

// Butterflies of distance h.
void butterflies(float* x, int dim, int h) {
  for (int i = 0; i < dim; i += 2 * h)
    for (int j = i; j < i + h; j += 8) {
      const __m256 a = _mm256_loadu_ps(x + j), b = _mm256_loadu_ps(x + j + h);
      _mm256_storeu_ps(x + j, _mm256_add_ps(a, b));
      _mm256_storeu_ps(x + j + h, _mm256_sub_ps(a, b));
    }
}

// Butterflies of distance h, then of distance 2h.
void butterflies_of_two(float* x, int dim, int h) {
  for (int i = 0; i < dim; i += 4 * h)
    for (int j = i; j < i + h; j += 8) {
      float* p = x + j;
      const __m256 a = _mm256_loadu_ps(p), b = _mm256_loadu_ps(p + h);
      const __m256 c = _mm256_loadu_ps(p + 2 * h), d = _mm256_loadu_ps(p + 3 * h);
      const __m256 ab = _mm256_add_ps(a, b), a_b = _mm256_sub_ps(a, b);
      const __m256 cd = _mm256_add_ps(c, d), c_d = _mm256_sub_ps(c, d);
      _mm256_storeu_ps(p, _mm256_add_ps(ab, cd));
      _mm256_storeu_ps(p + h, _mm256_add_ps(a_b, c_d));
      _mm256_storeu_ps(p + 2 * h, _mm256_sub_ps(ab, cd));
      _mm256_storeu_ps(p + 3 * h, _mm256_sub_ps(a_b, c_d));
    }
}

void blocks(float* x, const Rotation& r) {
  for (int i = 0; i < r.dim; i += 8)
    _mm256_storeu_ps(x + i, butterfly_in_register(_mm256_loadu_ps(x + i), r.block));
  int h = 8;
  for (; 4 * h <= r.block; h *= 4) butterflies_of_two(x, r.dim, h);
  if (h < r.block) butterflies(x, r.dim, h);
}

// Row i of the matrix (or column, transposed) over blocks of at least four channels.
void outer(float* x, const Rotation& r, bool transposed) {
  float y[kMaxHeadDim];
  const int n = r.order, length = r.block;
  for (int i = 0; i < n; ++i)
    for (int c = 0; c < length; c += 4) {
      __m128 sum = _mm_setzero_ps();
      for (int j = 0; j < n; ++j) {
        const __m128 v = _mm_loadu_ps(x + j * length + c);
        const int8_t sign = transposed ? r.matrix[j * n + i] : r.matrix[i * n + j];
        sum = sign > 0 ? _mm_add_ps(sum, v) : _mm_sub_ps(sum, v);
      }
      _mm_storeu_ps(y + i * length + c, sum);
    }
  std::memcpy(x, y, sizeof(float) * r.dim);
}

void scale(float* x, const Rotation& r) {
  const __m256 norm = _mm256_set1_ps(r.norm);
  for (int i = 0; i < r.dim; i += 8)
    _mm256_storeu_ps(x + i, _mm256_mul_ps(_mm256_loadu_ps(x + i), norm));
}

void fwht(float* x, const Rotation& r) {
  blocks(x, r);
  if (r.matrix) outer(x, r, false);
  scale(x, r);
}

void fwht_inverse(float* x, const Rotation& r) {
  if (r.matrix) outer(x, r, true);
  blocks(x, r);
  scale(x, r);
}

}  // namespace

const TransformKernels transform{load, load_bounded, store, fwht, fwht_inverse};

}  // namespace kvq::avx2
KVQ_TARGET_END
#endif
