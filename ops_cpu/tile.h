// One tile of one KV head: encoding from and decoding to float rows.
#pragma once
#include <cstdint>
#include <vector>

#include "ops_cpu/kernels.h"

namespace kvq {

// Float rows of a tile and the scratch of the encoder; reused from tile to tile.
struct TileBuffer {
  explicit TileBuffer(const Layout& layout);
  std::vector<float> key, value;  // [64, dim]
  std::vector<float> fold;        // a token sum in progress
  std::vector<uint8_t> codes;     // [64, max dim]
};

// Encode tokens first..63 of `buffer` into the record. Tokens before `first` and the mean they were
// encoded under stay as they are; with first == 0 the mean is taken and the record written whole.
// The rows of the buffer are overwritten.
void encode_tile(const Kernels& kernels, const Layout& layout, const float* balance, int first,
                 TileBuffer& buffer, uint8_t* record);

// Codes (a byte each) of one rotated vector and its float16 scale: the best of a few scales.
void encode_vector(const Kernels& kernels, const float* z, int dim, int bits, uint8_t* codes,
                   uint16_t* scale);

// Decode a record into the rows of `buffer`.
void decode_tile(const Kernels& kernels, const Layout& layout, const float* balance,
                 const uint8_t* record, TileBuffer& buffer);

// Balance of `count` key rows in a buffer of kBalanceFold rows, which is overwritten.
void key_balance(float* rows, int count, int dim, float* balance);

// NaN to 0 and the rest within +-65504, in place.
void sanitize(float* x, int64_t count);

}  // namespace kvq
