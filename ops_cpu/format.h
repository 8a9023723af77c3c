// The record format in C++: the mirror of torch_kvq/formats.py and docs/formats.md.
#pragma once
#include <cstdint>

namespace kvq {

constexpr int kTileTokens = 64;
constexpr int kMinHeadDim = 32;
constexpr int kMaxHeadDim = 512;
constexpr int kPassThroughBits = 16;
constexpr int kBalanceTokens = 192;
constexpr int kBalanceFold = 256;  // tokens that its sums are zero-padded to
constexpr float kVarianceFloor = 1e-4f;
constexpr float kLargestInput = 65504.0f;
constexpr int kScaleCandidates = 5;
constexpr float kScaleCandidate[kScaleCandidates] = {0.82f, 0.9f, 0.98f, 1.1f, 1.3f};

// Columns of `lengths`.
constexpr int kStart = 0;
constexpr int kLength = 1;
constexpr int kQuantized = 2;
constexpr int kLengthColumns = 3;

constexpr int8_t kLevels4[16] = {-63, -48, -37, -29, -22, -15, -9, -3,
                                 3,   9,   15,  22,  29,  37,  48, 63};
constexpr int8_t kLevels3[8] = {-31, -19, -11, -4, 4, 11, 19, 31};
constexpr int8_t kLevels2[4] = {-10, -3, 3, 10};
constexpr int8_t level_of(int bits, int code) {
  return bits == 4 ? kLevels4[code] : bits == 3 ? kLevels3[code] : kLevels2[code];
}

struct Codebook {
  int count;           // number of levels
  int8_t level[16];    // ascending
  float midpoint[15];  // between neighbours, exact in float32
  float per_sigma;     // levels in a standard deviation of the rotated vector
};
const Codebook& codebook(int bits);

struct Layout {
  int key_dim, value_dim, key_bits, value_bits;
  int64_t key_scale, key_code, value_scale, value_code, mean, mean_scale;  // byte offsets
  int64_t record_bytes;
  bool pass_through() const { return key_bits == kPassThroughBits; }
};
Layout make_layout(int key_dim, int value_dim, int key_bits, int value_bits, int itemsize);

bool valid_head_dim(int64_t dim);
bool valid_bits(int64_t key_bits, int64_t value_bits);

// The transform H of one dimension and the signs of keys and values.
struct Rotation {
  int dim;
  int order;             // 1, or 12, 20, 28: order of the outer Hadamard matrix
  int block;             // length of a Sylvester block
  float norm;            // 1 / sqrt(order of the whole transform)
  const int8_t* matrix;  // [order, order] of +-1, null when order is 1
};
const Rotation& rotation(int dim);
const float* key_signs();  // [kMaxHeadDim], +-1
const float* value_signs();

// Keys behind the sinks that the balance of a row is computed from.
int64_t balance_tokens(int64_t sink_tokens, int64_t quantized_start);

// Tokens of a row that belong in tiles once it holds `tokens` attended tokens.
int64_t quantized_tokens(int64_t tokens, int64_t quantized, int64_t sink_tokens,
                         int64_t residual_length, int64_t quantized_start);

}  // namespace kvq
