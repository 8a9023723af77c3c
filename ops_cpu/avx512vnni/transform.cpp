#if defined(__x86_64__)
#include <immintrin.h>

#include <cstring>

#include "ops_cpu/exp2.h"
#include "ops_cpu/kernels.h"
#include "ops_cpu/region.h"

KVQ_TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512vbmi,avx2,f16c")
#include "ops_cpu/avx512vnni/lanes.h"

namespace kvq::avx512vnni {
namespace {

void load(const void* in, Float type, float* out, int64_t count) {
  const int64_t whole = count / 16 * 16;
  for (int64_t i = 0; i < whole; i += 16) _mm512_storeu_ps(out + i, load16(in, type, i));
  if (whole < count)
    scalar::transform.load(static_cast<const uint8_t*>(in) + whole * size_of(type), type,
                           out + whole, count - whole);
}

void load_bounded(const void* in, Float type, float* out, int dim) {
  const __m512 most = _mm512_set1_ps(kLargestInput), least = _mm512_set1_ps(-kLargestInput);
  for (int d = 0; d < dim; d += 16) {
    const __m512 x = load16(in, type, d);
    const __m512 number = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, x, _CMP_ORD_Q), x);
    _mm512_storeu_ps(out + d, _mm512_max_ps(_mm512_min_ps(number, most), least));
  }
}

// As float_to_bfloat.
inline __m256i to_bfloat(__m512 x) {
  const __m512i bits = _mm512_castps_si512(x), high = _mm512_srli_epi32(bits, 16);
  const __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_srli_epi32(
      _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF))), 16);
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_mask_or_epi32(rounded, nan, high, _mm512_set1_epi32(0x40)));
}

void store(const float* in, void* out, Float type, int64_t count) {
  if (type == Float::kFloat32) {
    std::memcpy(out, in, count * sizeof(float));
    return;
  }
  int64_t i = 0;
  if (type == Float::kFloat16)
    for (; i + 16 <= count; i += 16)
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(static_cast<uint16_t*>(out) + i),
                          _mm512_cvtps_ph(_mm512_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT));
  else
    for (; i + 16 <= count; i += 16)
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(static_cast<uint16_t*>(out) + i),
                          to_bfloat(_mm512_loadu_ps(in + i)));
  scalar::transform.store(in + i, static_cast<uint16_t*>(out) + i, type, count - i);
}

// Butterflies of distance 1 to 8, as far as they stay inside a block, stay inside a register.
inline __m512 butterfly_in_register(__m512 x, int length) {
  const __m512 minus = _mm512_set1_ps(-0.0f);
  x = _mm512_add_ps(_mm512_permute_ps(x, 0xB1), _mm512_mask_xor_ps(x, 0xAAAA, x, minus));
  x = _mm512_add_ps(_mm512_permute_ps(x, 0x4E), _mm512_mask_xor_ps(x, 0xCCCC, x, minus));
  if (length < 8) return x;
  x = _mm512_add_ps(_mm512_shuffle_f32x4(x, x, 0xB1), _mm512_mask_xor_ps(x, 0xF0F0, x, minus));
  if (length < 16) return x;
  return _mm512_add_ps(_mm512_shuffle_f32x4(x, x, 0x4E), _mm512_mask_xor_ps(x, 0xFF00, x, minus));
}

// Butterflies of distance h.
void butterflies(float* x, int dim, int h) {
  for (int i = 0; i < dim; i += 2 * h)
    for (int j = i; j < i + h; j += 16) {
      const __m512 a = _mm512_loadu_ps(x + j), b = _mm512_loadu_ps(x + j + h);
      _mm512_storeu_ps(x + j, _mm512_add_ps(a, b));
      _mm512_storeu_ps(x + j + h, _mm512_sub_ps(a, b));
    }
}

// Butterflies of distance h, then of distance 2h.
void butterflies_of_two(float* x, int dim, int h) {
  for (int i = 0; i < dim; i += 4 * h)
    for (int j = i; j < i + h; j += 16) {
      float* p = x + j;
      const __m512 a = _mm512_loadu_ps(p), b = _mm512_loadu_ps(p + h);
      const __m512 c = _mm512_loadu_ps(p + 2 * h), d = _mm512_loadu_ps(p + 3 * h);
      const __m512 ab = _mm512_add_ps(a, b), a_b = _mm512_sub_ps(a, b);
      const __m512 cd = _mm512_add_ps(c, d), c_d = _mm512_sub_ps(c, d);
      _mm512_storeu_ps(p, _mm512_add_ps(ab, cd));
      _mm512_storeu_ps(p + h, _mm512_add_ps(a_b, c_d));
      _mm512_storeu_ps(p + 2 * h, _mm512_sub_ps(ab, cd));
      _mm512_storeu_ps(p + 3 * h, _mm512_sub_ps(a_b, c_d));
    }
}

void blocks(float* x, const Rotation& r) {
  for (int i = 0; i < r.dim; i += 16)
    _mm512_storeu_ps(x + i, butterfly_in_register(_mm512_loadu_ps(x + i), r.block));
  int h = 16;
  for (; 4 * h <= r.block; h *= 4) butterflies_of_two(x, r.dim, h);
  if (h < r.block) butterflies(x, r.dim, h);
}

// Row i of the matrix (or column, transposed) over blocks of at least four channels.
void outer(float* x, const Rotation& r, bool transposed) {
  float y[kMaxHeadDim];
  const int n = r.order, length = r.block;
  const __mmask16 used = static_cast<__mmask16>(length >= 16 ? 0xFFFF : (1 << length) - 1);
  for (int i = 0; i < n; ++i)
    for (int c = 0; c < length; c += 16) {
      __m512 sum = _mm512_setzero_ps();
      for (int j = 0; j < n; ++j) {
        const __m512 v = _mm512_maskz_loadu_ps(used, x + j * length + c);
        const int8_t sign = transposed ? r.matrix[j * n + i] : r.matrix[i * n + j];
        sum = sign > 0 ? _mm512_add_ps(sum, v) : _mm512_sub_ps(sum, v);
      }
      _mm512_mask_storeu_ps(y + i * length + c, used, sum);
    }
  std::memcpy(x, y, sizeof(float) * r.dim);
}

void scale(float* x, const Rotation& r) {
  const __m512 norm = _mm512_set1_ps(r.norm);
  for (int i = 0; i < r.dim; i += 16)
    _mm512_storeu_ps(x + i, _mm512_mul_ps(_mm512_loadu_ps(x + i), norm));
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

}  // namespace kvq::avx512vnni
KVQ_TARGET_END
#endif
