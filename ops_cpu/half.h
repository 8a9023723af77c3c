// float16 and bfloat16 in integer arithmetic, rounding to nearest even. Static: each object has its
// own copy, so that none compiled for another instruction set is linked in its place.
#pragma once
#include <cstdint>
#include <cstring>

namespace kvq {

static inline uint32_t float_bits(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  return u;
}
static inline float bits_float(uint32_t u) {
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}

static inline float half_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16;
  const uint32_t exponent = h >> 10 & 31, mantissa = h & 1023;
  if (exponent == 31) return bits_float(sign | 0x7F800000 | mantissa << 13);
  if (exponent) return bits_float(sign | (exponent + 112) << 23 | mantissa << 13);
  const float magnitude = static_cast<float>(mantissa) * (1.0f / 16777216.0f);
  return sign ? -magnitude : magnitude;
}

static inline uint16_t float_to_half(float x) {
  const uint32_t u = float_bits(x), sign = u >> 16 & 0x8000, a = u & 0x7FFFFFFF;
  if (a > 0x7F800000) return static_cast<uint16_t>(sign | 0x7E00 | (a >> 13 & 0x3FF));
  if (a >= 0x477FF000) return static_cast<uint16_t>(sign | 0x7C00);  // rounds past 65504
  if (a <
      0x38800000) {  // subnormal: adding 0.5 leaves the rounded multiple of 2^-24 in the low bits
    const float shifted = bits_float(a) + 0.5f;
    return static_cast<uint16_t>(sign | (float_bits(shifted) - 0x3F000000));
  }
  const uint32_t rounded = a - 0x38000000 + 0xFFF + (a >> 13 & 1);
  return static_cast<uint16_t>(sign | rounded >> 13);
}

static inline float bfloat_to_float(uint16_t h) {
  return bits_float(static_cast<uint32_t>(h) << 16);
}

static inline uint16_t float_to_bfloat(float x) {
  const uint32_t u = float_bits(x);
  if ((u & 0x7FFFFFFF) > 0x7F800000) return static_cast<uint16_t>(u >> 16 | 0x40);
  return static_cast<uint16_t>((u + 0x7FFF + (u >> 16 & 1)) >> 16);
}

}  // namespace kvq
