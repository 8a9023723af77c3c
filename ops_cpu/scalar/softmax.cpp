#include <limits>

#include "ops_cpu/exp2.h"
#include "ops_cpu/kernels.h"

namespace kvq::scalar {
namespace {

constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();

void softmax_row(const float* scores, Softmax* state, float* acc, int dim, float* p) {
  float max = kNegativeInfinity;
  for (int t = 0; t < kTileTokens; ++t) max = scores[t] > max ? scores[t] : max;
  if (max == kNegativeInfinity) {
    for (int t = 0; t < kTileTokens; ++t) p[t] = 0.0f;
    return;
  }
  if (max > state->max) {
    const float shrink = exp2_nonpositive(state->max - max);
    for (int j = 0; j < 16; ++j) state->lanes[j] = state->lanes[j] * shrink;
    for (int d = 0; d < dim; ++d) acc[d] = acc[d] * shrink;
    state->max = max;
  }
  for (int t = 0; t < kTileTokens; ++t) p[t] = exp2_nonpositive(scores[t] - state->max);
  for (int j = 0; j < 16; ++j)
    state->lanes[j] = state->lanes[j] + ((p[j] + p[16 + j]) + (p[32 + j] + p[48 + j]));
}

void softmax_rows(const float* scores, Softmax* states, float* acc, int dim, int rows, float* p) {
  for (int r = 0; r < rows; ++r)
    softmax_row(scores + r * kTileTokens, states + r, acc + r * dim, dim, p + r * kTileTokens);
}

}  // namespace

const SoftmaxKernels softmax{softmax_rows};

}  // namespace kvq::scalar
