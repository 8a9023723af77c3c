#include <cmath>
#include <cstring>

#include "ops_cpu/half.h"
#include "ops_cpu/kernels.h"
#include "ops_cpu/scalar/lanes.h"

namespace kvq::scalar {
namespace {

void encode_vector(const float* z, int dim, int bits, uint8_t* codes, uint16_t* scale) {
  const Codebook& book = codebook(bits);
  const float rms = std::sqrt(dot(z, z, dim) / static_cast<float>(dim));
  uint8_t trial[kMaxHeadDim];
  float levels[kMaxHeadDim];
  float best = -1.0f, best_scale = 0.0f;
  for (int g = 0; g < kScaleCandidates; ++g) {
    const float step = rms > 0.0f ? book.per_sigma / (rms * kScaleCandidate[g]) : 0.0f;
    int norm = 0;
    for (int d = 0; d < dim; ++d) {
      const float u = z[d] * step;
      int code = 0;
      for (int m = 0; m + 1 < book.count; ++m) code += book.midpoint[m] <= u;
      trial[d] = static_cast<uint8_t>(code);
      levels[d] = book.level[code];
      norm += book.level[code] * book.level[code];
    }
    const float product = dot(z, levels, dim);
    const float gain = product * product / static_cast<float>(norm);
    if (gain > best) {
      best = gain;
      best_scale = product / static_cast<float>(norm);
      std::memcpy(codes, trial, dim);
    }
  }
  if (!(rms > 0.0f)) best_scale = 0.0f;
  *scale = float_to_half(best_scale < kLargestInput ? best_scale : kLargestInput);
}

}  // namespace

const EncodeKernels encode{encode_vector};

}  // namespace kvq::scalar
