// Records of layer inputs: 64 tokens of a row, all channels (docs/formats.md, "X record").
#pragma once
#include <cstdint>
#include <vector>

#include "ops_cpu/kernels.h"

namespace kvq {

constexpr int kMostInt8 = 127;
constexpr int kEightBits = 8;

struct XLayout {
  int64_t channels;
  int bits;
  bool per_channel;  // groups of the 64 tokens of a channel, not of 64 channels of a token
  int64_t mean, mean_scale, code;  // byte offsets; the scales are first
  int64_t record_bytes;
  bool pass_through() const { return bits == kPassThroughBits; }
  int64_t groups() const { return channels / kGroupCodes; }
};
bool valid_x_bits(int64_t bits);
bool valid_channels(int64_t channels);
XLayout make_x_layout(int64_t channels, int bits, bool per_channel, int itemsize);

// Float rows of a page; reused from page to page.
struct XBuffer {
  explicit XBuffer(const XLayout& layout);
  std::vector<float> rows;   // [64, channels]
  std::vector<float> group;  // [64, 64], the tokens of each channel of a block
};

// Encode the rows of `buffer`, which come from TransformKernels::load_bounded and are overwritten.
void encode_x(const Kernels& kernels, const XLayout& layout, bool rotate, XBuffer& buffer,
              uint8_t* record);

// Decode a record into [64, channels] of `out`.
void decode_x(const Kernels& kernels, const XLayout& layout, bool rotate, const uint8_t* record,
              XBuffer& buffer, Float type, uint8_t* out);

}  // namespace kvq
