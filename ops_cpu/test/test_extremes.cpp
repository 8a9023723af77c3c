// Levels, queries and weights at their limits against 64-bit arithmetic: nothing may saturate or
// wrap. Every token of keys, channel of values and row has a pattern of signs of its own.
#include <cstdint>
#include <string>
#include <vector>

#include "ops_cpu/packing.h"
#include "ops_cpu/test/check.h"

namespace {

using namespace kvq;

constexpr int kPatterns = 9;
constexpr float kMagnitude = 0.37f;
constexpr uint16_t kHalfOne = 0x3C00;

// All positive, all negative, or alternating in runs of 1, 2, 4, ..., 64.
bool positive(int pattern, int i) {
  if (pattern < 2) return pattern == 0;
  return (i >> (pattern - 2) & 1) == 0;
}

uint8_t extreme_code(int bits, bool largest) {
  return static_cast<uint8_t>(largest ? (1 << bits) - 1 : 0);
}

std::string name(const char* what, int dim, int bits, bool exact) {
  return std::string(what) + " at the limits, " + std::to_string(dim) + " at " +
         std::to_string(bits) + (exact ? ", exact" : ", fast");
}

void test_scores(const Kernels& k, int dim, int bits, bool exact) {
  std::vector<uint8_t> codes(kTileTokens * dim), packed(8 * dim * bits);
  for (int t = 0; t < kTileTokens; ++t)
    for (int c = 0; c < dim; ++c)
      codes[t * dim + c] = extreme_code(bits, positive(t % kPatterns, c));
  pack_keys(codes.data(), dim, bits, packed.data());

  const int row_bytes = dim * integer_bytes(exact);
  std::vector<uint8_t> query(kPatterns * row_bytes);
  std::vector<int32_t> sums(kPatterns), scores(kPatterns * kTileTokens);
  std::vector<float> x(dim);
  for (int r = 0; r < kPatterns; ++r) {
    for (int c = 0; c < dim; ++c) x[c] = positive(r, c) ? kMagnitude : -kMagnitude;
    float unit;
    k.packed->quantize_query(x.data(), dim, exact, &query[r * row_bytes], &sums[r], &unit);
  }
  k.packed->score_tile(packed.data(), packed.data(), dim, bits, query.data(), exact, sums.data(),
                       kPatterns, scores.data());

  const int64_t limit = exact ? kQueryLimitExact : kQueryLimitFast;
  bool ok = true;
  for (int r = 0; r < kPatterns; ++r)
    for (int t = 0; t < kTileTokens; ++t) {
      int64_t wanted = 0;
      for (int c = 0; c < dim; ++c)
        wanted += (positive(r, c) ? limit : -limit) * level_of(bits, codes[t * dim + c]);
      ok &= scores[r * kTileTokens + t] == wanted;
    }
  expect(ok, name("scores", dim, bits, exact));
}

void test_outputs(const Kernels& k, int dim, int bits, bool exact) {
  std::vector<uint8_t> codes(kTileTokens * dim), packed(8 * dim * bits);
  for (int t = 0; t < kTileTokens; ++t)
    for (int c = 0; c < dim; ++c)
      codes[t * dim + c] = extreme_code(bits, positive(c % kPatterns, t));
  pack_values(codes.data(), dim, bits, packed.data());

  std::vector<float> p(kPatterns * kTileTokens);
  for (int r = 0; r < kPatterns; ++r)
    for (int t = 0; t < kTileTokens; ++t)
      p[r * kTileTokens + t] = positive(r, t) ? kMagnitude : 0.0f;
  const std::vector<uint16_t> value_scales(kTileTokens, kHalfOne);
  std::vector<uint8_t> weights(kPatterns * kTileTokens * integer_bytes(exact));
  std::vector<int32_t> sums(kPatterns);
  std::vector<float> units(kPatterns), out(kPatterns * dim);
  k.packed->quantize_weights(p.data(), value_scales.data(), exact, kPatterns, weights.data(),
                             sums.data(), units.data());
  units.assign(kPatterns, 1.0f);
  k.packed->accumulate_tile(packed.data(), packed.data(), dim, bits, weights.data(), exact,
                            sums.data(), units.data(), kPatterns, out.data());

  const int64_t limit = exact ? kWeightLimitExact : kWeightLimitFast;
  bool ok = true;
  for (int r = 0; r < kPatterns; ++r)
    for (int c = 0; c < dim; ++c) {
      int64_t wanted = 0;
      for (int t = 0; t < kTileTokens; ++t)
        wanted += (positive(r, t) ? limit : 0) * level_of(bits, codes[t * dim + c]);
      ok &= out[r * dim + c] == static_cast<float>(wanted);
    }
  expect(ok, name("outputs", dim, bits, exact));
}

}  // namespace

void test_extremes(const kvq::Kernels& k) {
  for (int dim = kMinHeadDim; dim <= kMaxHeadDim; dim += 16)
    for (int bits : {2, 3, 4})
      for (bool exact : {false, true}) {
        test_scores(k, dim, bits, exact);
        test_outputs(k, dim, bits, exact);
      }
}
