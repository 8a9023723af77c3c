// E4M3 in integer arithmetic: one sign bit, four of exponent, three of mantissa, no infinity.
// Static for the reason given in half.h.
#pragma once
#include "ops_cpu/half.h"

namespace kvq {

constexpr float kLargestE4M3 = 448.0f;
constexpr uint8_t kMagnitudeE4M3 = 127;  // the code without its sign; as a code, NaN

// The upper half of the float32: a bfloat16.
constexpr uint16_t e4m3_to_bfloat(uint8_t code) {
  const int magnitude = code & kMagnitudeE4M3;
  const int sign = (code & 0x80) << 8;
  if (magnitude == kMagnitudeE4M3) return static_cast<uint16_t>(sign | 0x7FC0);
  if (magnitude >= 8) return static_cast<uint16_t>(sign | ((120 << 7) + (magnitude << 4)));
  if (magnitude == 0) return static_cast<uint16_t>(sign);
  const int power = magnitude >= 4 ? 2 : magnitude >= 2 ? 1 : 0;  // of the leading bit
  const int fraction = (magnitude << (7 - power)) & 127;
  return static_cast<uint16_t>(sign | (127 - 9 + power) << 7 | fraction);
}

static inline float e4m3_to_float(uint8_t code) { return bfloat_to_float(e4m3_to_bfloat(code)); }

// The nearest code, even in the middle; a magnitude above 448 becomes 448. Not for NaN.
static inline uint8_t float_to_e4m3(float x) {
  const uint32_t u = float_bits(x), sign = u >> 24 & 0x80;
  const uint32_t a = u & 0x7FFFFFFF;
  if (a >= float_bits(kLargestE4M3)) return static_cast<uint8_t>(sign | 126);
  if (a < float_bits(1.0f / 64.0f)) {  // adding 2^14 leaves the rounded multiple of 2^-9
    const float shifted = bits_float(a) + 16384.0f;
    return static_cast<uint8_t>(sign | (float_bits(shifted) - float_bits(16384.0f)));
  }
  const uint32_t rounded = a - (120u << 23) + 0x7FFFF + (a >> 20 & 1);
  return static_cast<uint8_t>(sign | rounded >> 20);
}

}  // namespace kvq
