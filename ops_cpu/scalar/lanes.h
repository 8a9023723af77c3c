// The order of sums over a vector (docs/formats.md, "Encoding").
#pragma once

namespace kvq::scalar {
namespace {

// Sixteen lanes folded 8, 4, 2 and 1 apart; the lanes are overwritten.
inline float fold(float* lane) {
  for (int half = 8; half >= 1; half /= 2)
    for (int j = 0; j < half; ++j) lane[j] = lane[j] + lane[j + half];
  return lane[0];
}

template <typename T>
inline float dot(const float* x, const T* y, int dim) {
  float lane[16];
  for (int j = 0; j < 16; ++j) lane[j] = x[j] * static_cast<float>(y[j]);
  for (int i = 16; i < dim; i += 16)
    for (int j = 0; j < 16; ++j) lane[j] = lane[j] + x[i + j] * static_cast<float>(y[i + j]);
  return fold(lane);
}

}  // namespace
}  // namespace kvq::scalar
