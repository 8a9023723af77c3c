// AVX-512 without a CPU that has it: the intrinsics of SIMDe, and here those that SIMDe 0.8.2 lacks
// or gets wrong. One that is in neither is the compiler's own, which fails to compile.
#pragma once
#include_next <immintrin.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>

namespace emulated {

// The elements of a vector register.
template <typename T, int kCount>
struct Elements {
  T at[kCount] = {};

  Elements() = default;
  template <typename Vector>
  explicit Elements(const Vector& v) {
    static_assert(sizeof(v) == sizeof(at));
    std::memcpy(at, &v, sizeof(at));
  }
  template <typename Vector>
  Vector as() const {
    Vector v;
    static_assert(sizeof(v) == sizeof(at));
    std::memcpy(&v, at, sizeof(at));
    return v;
  }
};

// Where a CPU would fault.
inline const void* aligned(const void* p) {
  if (reinterpret_cast<uintptr_t>(p) % 64) std::abort();
  return p;
}

inline __m128i cvtepi32_epi8(__m512i v) {
  const Elements<uint32_t, 16> x(v);
  Elements<uint8_t, 16> out;
  for (int i = 0; i < 16; ++i) out.at[i] = static_cast<uint8_t>(x.at[i]);
  return out.as<__m128i>();
}

inline __m256i cvtepi32_epi16(__m512i v) {
  const Elements<uint32_t, 16> x(v);
  Elements<uint16_t, 16> out;
  for (int i = 0; i < 16; ++i) out.at[i] = static_cast<uint16_t>(x.at[i]);
  return out.as<__m256i>();
}

inline __m512i cvtepi8_epi32(__m128i v) {
  const Elements<int8_t, 16> x(v);
  Elements<int32_t, 16> out;
  for (int i = 0; i < 16; ++i) out.at[i] = x.at[i];
  return out.as<__m512i>();
}

template <int kRounding>
__m256i cvtps_ph(__m512 v) {
  const Elements<__m256, 2> x(v);
  Elements<__m128i, 2> out;
  for (int i = 0; i < 2; ++i) out.at[i] = _mm256_cvtps_ph(x.at[i], kRounding);
  return out.as<__m256i>();
}

template <int kOrder>
__m512 permute_ps(__m512 v) {
  const Elements<float, 16> x(v);
  Elements<float, 16> out;
  for (int i = 0; i < 16; ++i) out.at[i] = x.at[(i & ~3) + (kOrder >> 2 * (i & 3) & 3)];
  return out.as<__m512>();
}

inline int32_t reduce_add_epi32(__m512i v) {
  uint32_t sum = 0;
  for (uint32_t x : Elements<uint32_t, 16>(v).at) sum += x;
  return static_cast<int32_t>(sum);
}

// SIMDe reads what is masked out, and writes zeros there.
inline __m512 maskz_loadu_ps(__mmask16 mask, const float* p) {
  Elements<float, 16> out;
  for (int i = 0; i < 16; ++i)
    if (mask >> i & 1) out.at[i] = p[i];
  return out.as<__m512>();
}

inline void mask_storeu_ps(float* p, __mmask16 mask, __m512 v) {
  const Elements<float, 16> x(v);
  for (int i = 0; i < 16; ++i)
    if (mask >> i & 1) p[i] = x.at[i];
}

inline void mask_storeu_epi8(uint8_t* p, __mmask64 mask, __m512i v) {
  const Elements<uint8_t, 64> x(v);
  for (int i = 0; i < 64; ++i)
    if (mask >> i & 1) p[i] = x.at[i];
}

}  // namespace emulated

#undef _mm512_cvtps_ph
#undef _mm512_load_ps
#undef _mm512_load_si512
#undef _mm512_mask_storeu_ps
#undef _mm512_maskz_loadu_ps
#undef _mm512_permute_ps
#undef _mm512_roundscale_ps
#undef _mm512_store_ps
#define _mm512_cvtepi32_epi16 emulated::cvtepi32_epi16
#define _mm512_cvtepi32_epi8 emulated::cvtepi32_epi8
#define _mm512_cvtepi8_epi32 emulated::cvtepi8_epi32
#define _mm512_cvtps_ph(v, rounding) emulated::cvtps_ph<rounding>(v)
#define _mm512_load_ps(p) simde_mm512_load_ps(emulated::aligned(p))
#define _mm512_load_si512(p) simde_mm512_load_si512(emulated::aligned(p))
#define _mm512_mask_storeu_epi8 emulated::mask_storeu_epi8
#define _mm512_mask_storeu_ps emulated::mask_storeu_ps
#define _mm512_maskz_loadu_ps emulated::maskz_loadu_ps
#define _mm512_permute_ps(v, order) emulated::permute_ps<order>(v)
#define _mm512_reduce_add_epi32 emulated::reduce_add_epi32
// Without the parentheses SIMDe takes a control of several flags apart.
#define _mm512_roundscale_ps(v, control) simde_mm512_roundscale_ps(v, (control))
#define _mm512_store_ps(p, v) simde_mm512_store_ps(const_cast<void*>(emulated::aligned(p)), v)
