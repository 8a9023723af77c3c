#include "ops_cpu/attention_plan.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "ops_cpu/exp2.h"

namespace kvq {
namespace {

constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();

// Splits follow from the shapes and lengths alone, so the result does not depend on the threads.
constexpr int64_t kMinTilesPerSplit = 16;
constexpr int64_t kWantedUnits = 32;

float sink_logit(const AttentionCall& c, const Kernels& kernels, int64_t head) {
  float x;
  const auto* p = static_cast<const uint8_t*>(c.sinks) + head * size_of(c.sinks_type);
  kernels.transform->load(p, c.sinks_type, &x, 1);
  return x * kLog2E;
}

}  // namespace

Row read_row(const int32_t* lengths, int64_t batch) {
  const int32_t* l = lengths + batch * kLengthColumns;
  const int64_t tokens = std::max<int64_t>(l[kLength] - l[kStart], 0);
  return {l[kStart], l[kLength], tokens, l[kQuantized],
          (l[kQuantized] + kTileTokens - 1) / kTileTokens};
}

int64_t first_tile(const AttentionCall& call, const Row& row) {
  if (call.sliding_window == 0) return 0;
  const int64_t position = row.length - call.queries - call.sliding_window + 1;
  const int64_t behind_sinks = position - row.start - call.sink_tokens;
  return std::clamp<int64_t>(behind_sinks / kTileTokens, 0, row.tiles);
}

Plan::Plan(const AttentionCall& call)
    : c(call), group(call.heads / call.kv_heads), rows(group * call.queries) {
  blocks = (rows + kMaxRows - 1) / kMaxRows;
  int64_t tiles = 0;
  if (!c.layout.pass_through())
    for (int64_t b = 0; b < c.batch; ++b) {
      const Row row = read_row(c.lengths, b);
      tiles = std::max(tiles, row.tiles - first_tile(c, row));
    }
  splits = rotated = share(tiles, kMinTilesPerSplit);
  parts = splits + 1;
  partial_stride = c.layout.value_dim + 2;
}

int64_t Plan::share(int64_t count, int64_t least) const {
  const int64_t units = std::max<int64_t>(items(), 1);
  return std::min((count + least - 1) / least, (kWantedUnits + units - 1) / units);
}

void merge_row(const Kernels& kernels, const Plan& plan, const float* partial, int64_t part_stride,
               int64_t batch, int64_t head, int64_t query) {
  const AttentionCall& c = plan.c;
  const int dim = c.layout.value_dim;
  float max = c.sinks ? sink_logit(c, kernels, head) : kNegativeInfinity;
  const float sink = max;
  for (int64_t s = 0; s < plan.parts; ++s) max = std::max(max, partial[s * part_stride + dim]);

  float tiles[kMaxHeadDim], out[kMaxHeadDim];
  std::fill_n(tiles, dim, 0.0f);
  float sum = c.sinks ? exp2_nonpositive(sink - max) : 0.0f;
  const int64_t index = (batch * c.heads + head) * c.queries + query;
  if (max == kNegativeInfinity) {
    std::fill_n(out, dim, 0.0f);
    c.lse[index] = kNegativeInfinity;
  } else {
    float exact[kMaxHeadDim];
    std::fill_n(exact, dim, 0.0f);
    for (int64_t s = 0; s < plan.parts; ++s) {
      const float* part = partial + s * part_stride;
      const float weight = exp2_nonpositive(part[dim] - max);
      if (weight == 0.0f) continue;
      sum = sum + weight * part[dim + 1];
      float* sums = s < plan.rotated ? tiles : exact;
      for (int d = 0; d < dim; ++d) sums[d] = sums[d] + weight * part[d];
    }
    if (plan.rotated > 0) kernels.transform->fwht_inverse(tiles, rotation(dim));
    const float* signs = value_signs();
    const float inverse = 1.0f / sum;
    for (int d = 0; d < dim; ++d) out[d] = (tiles[d] * signs[d] + exact[d]) * inverse;
    c.lse[index] = (max + std::log2(sum)) * kLn2;
  }
  auto* to = static_cast<uint8_t*>(c.out) + index * dim * size_of(c.query_type);
  kernels.transform->store(out, to, c.query_type, dim);
}

}  // namespace kvq
