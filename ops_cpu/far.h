// Far records of one KV head: fp8 keys and int4 values (docs/formats.md, "Far record").
#pragma once
#include <cstdint>
#include <vector>

#include "ops_cpu/kernels.h"

namespace kvq {

struct FarLayout {
  int key_dim, value_dim;
  int64_t key_scale, key_code, value_scale, value_middle, value_code;  // byte offsets
  int64_t record_bytes;
};
FarLayout make_far_layout(int key_dim, int value_dim);

// Float rows of a tile and codes on their way; reused from tile to tile.
struct FarBuffer {
  explicit FarBuffer(const FarLayout& layout);
  std::vector<float> key, value;  // [64, dim]
  std::vector<uint8_t> codes;     // [64, max dim]
};

// Encode the rows of `buffer`, which come from TransformKernels::load_bounded.
void encode_far(const Kernels& kernels, const FarLayout& layout, FarBuffer& buffer,
                uint8_t* record);

// Decode a record into the rows of `buffer`.
void decode_far(const FarLayout& layout, const uint8_t* record, FarBuffer& buffer);

// Where the code of a key lies among those of its tile.
constexpr int fp8_place(int token, int channel, int dim) {
  return ((token >> 4) * (dim >> 2) + (channel >> 2)) * 64 + (token >> 2 & 3) * 16 +
         (channel >> 1 & 1) * 8 + (token & 3) * 2 + (channel & 1);
}

}  // namespace kvq
