#include <cmath>

#include "ops_cpu/e4m3.h"
#include "ops_cpu/kernels.h"

namespace kvq::scalar {
namespace {

float largest(const float* x, int dim) {
  float most = 0.0f;
  for (int d = 0; d < dim; ++d) most = std::fabs(x[d]) > most ? std::fabs(x[d]) : most;
  return most;
}

void range(const float* x, int dim, float* low, float* high) {
  *low = *high = x[0];
  for (int d = 1; d < dim; ++d) {
    *low = x[d] < *low ? x[d] : *low;
    *high = x[d] > *high ? x[d] : *high;
  }
}

void write_fp8(const float* x, int dim, float scale, uint8_t* codes) {
  for (int d = 0; d < dim; ++d) codes[d] = float_to_e4m3(scale > 0.0f ? x[d] / scale : 0.0f);
}

void write_int4(const float* x, int dim, float middle, float scale, uint8_t* codes) {
  constexpr float kMost = kFarValueSteps;
  const float step = 2.0f * scale;
  for (int d = 0; d < dim; ++d) {
    const float steps = step > 0.0f ? (x[d] - middle) / step : 0.0f;
    const float code = std::nearbyint(steps + kMost / 2);
    codes[d] = static_cast<uint8_t>(code < 0.0f ? 0.0f : code > kMost ? kMost : code);
  }
}

}  // namespace

const FarEncodeKernels far_encode{largest, range, write_fp8, write_int4};

}  // namespace kvq::scalar
