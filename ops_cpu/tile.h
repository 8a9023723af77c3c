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
// The rows of the buffer come from TransformKernels::load_bounded.
void encode_tile(const Kernels& kernels, const Layout& layout, const float* balance, int first,
                 TileBuffer& buffer, uint8_t* record);

// Codes (a byte each) of one rotated vector, aligned and padded as EncodeKernels says, and the best
// of a few scales.
float encode_vector(const EncodeKernels& kernels, const float* z, int dim, int bits,
                    uint8_t* codes);

// Decode a record into the rows of `buffer`.
void decode_tile(const Kernels& kernels, const Layout& layout, const float* balance,
                 const uint8_t* record, TileBuffer& buffer);

// Balance of `count` rows from TransformKernels::load_bounded in a buffer of kBalanceFold rows,
// which is overwritten.
void key_balance(float* rows, int count, int dim, float* balance);

}  // namespace kvq
