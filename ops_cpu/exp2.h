// The scalar form of the kernels' 2^x, for the few factors outside the inner loops.
#pragma once
#include "ops_cpu/half.h"

namespace kvq {

// Minimax polynomial of 2^r on [0, 1); relative error 1.6e-7.
constexpr float kExp2[6] = {1.0f,         0.6931513f,  0.24016444f,
                            0.055799913f, 0.00901703f, 0.0018671305f};
constexpr float kExp2Lowest = -126.0f;  // below this 2^x counts as zero; NaN stays NaN
constexpr float kLog2E = 1.44269504f;
constexpr float kLn2 = 0.693147181f;

static inline float exp2_nonpositive(float x) {
  if (x < kExp2Lowest) return 0.0f;
  if (x != x) return x;
  int whole = static_cast<int>(x);
  if (static_cast<float>(whole) > x) --whole;
  const float r = x - static_cast<float>(whole);
  float p = kExp2[5];
  for (int i = 4; i >= 0; --i) p = p * r + kExp2[i];
  return bits_float(float_bits(p) + (static_cast<uint32_t>(whole) << 23));
}

}  // namespace kvq
