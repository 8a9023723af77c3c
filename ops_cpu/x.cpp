#include "ops_cpu/x.h"

#include <cmath>
#include <cstring>

#include "ops_cpu/half.h"
#include "ops_cpu/tile.h"

namespace kvq {
namespace {

constexpr int kCodes = kGroupCodes;
static_assert(kTileTokens == kGroupCodes, "both axes have groups of one size");

void store_half(uint8_t* p, uint16_t h) { std::memcpy(p, &h, 2); }

float load_half(const uint8_t* p) {
  uint16_t h;
  std::memcpy(&h, p, 2);
  return half_to_float(h);
}

// Blocks of 64 channels side by side.
Rotation blocks_of(int64_t channels) {
  return {static_cast<int>(channels), 1, kCodes, 0.125f, nullptr};
}

// Codes of a group, a byte each, to the planes of docs/formats.md.
void pack_group(const uint8_t* codes, int bits, uint8_t* packed) {
  if (bits == 4) {
    for (int i = 0; i < 32; ++i) packed[i] = static_cast<uint8_t>(codes[i] | codes[32 + i] << 4);
    return;
  }
  for (int i = 0; i < 16; ++i)
    packed[i] = static_cast<uint8_t>((codes[i] & 3) | (codes[16 + i] & 3) << 2 |
                                     (codes[32 + i] & 3) << 4 | (codes[48 + i] & 3) << 6);
  if (bits == 2) return;
  for (int i = 0; i < 8; ++i) {
    int high = 0;
    for (int j = 0; j < 8; ++j) high |= codes[8 * i + j] >> 2 << j;
    packed[16 + i] = static_cast<uint8_t>(high);
  }
}

// One group: its codes packed and its scale.
void encode_group(const Kernels& kernels, int bits, const float* z, uint8_t* scale,
                  uint8_t* packed) {
  if (bits == kEightBits) {
    const uint16_t half = float_to_half(kernels.far_encode->largest(z, kCodes) / kMostInt8);
    store_half(scale, half);
    kernels.x->write_int8(z, half_to_float(half), packed);
    return;
  }
  uint8_t codes[kCodes];
  store_half(scale, float_to_half(encode_vector(*kernels.encode, z, kCodes, bits, codes)));
  pack_group(codes, bits, packed);
}

void encode_tokens(const Kernels& kernels, const XLayout& f, const XBuffer& b, uint8_t* record) {
  alignas(64) float z[kCodes];
  for (int64_t i = 0; i < kTileTokens * f.groups(); ++i) {
    std::memcpy(z, b.rows.data() + i * kCodes, sizeof(z));
    encode_group(kernels, f.bits, z, record + 2 * i, record + f.code + i * kCodes * f.bits / 8);
  }
}

// Sum of a channel over its tokens, which are folded 32, 16, 8, 4, 2 and 1 apart.
float token_sum(const float* x) {
  float part[kTileTokens / 2];
  for (int t = 0; t < kTileTokens / 2; ++t) part[t] = x[t] + x[t + kTileTokens / 2];
  for (int half = kTileTokens / 4; half >= 1; half /= 2)
    for (int t = 0; t < half; ++t) part[t] = part[t] + part[t + half];
  return part[0];
}

// The int8 means of the channels of a block and their scale; takes the means off the tokens.
void take_means(const XLayout& f, int64_t block, float* tokens, uint8_t* record) {
  float mean[kCodes], most = 0.0f;
  for (int c = 0; c < kCodes; ++c) {
    mean[c] = token_sum(tokens + c * kTileTokens) * (1.0f / kTileTokens);
    most = std::fabs(mean[c]) > most ? std::fabs(mean[c]) : most;
  }
  const uint16_t half = float_to_half(most / kMostInt8);
  const float scale = half_to_float(half);
  store_half(record + f.mean_scale + 2 * block, half);
  for (int c = 0; c < kCodes; ++c) {
    float step = scale > 0.0f ? std::nearbyint(mean[c] / scale) : 0.0f;
    step = step > kMostInt8 ? kMostInt8 : step < -kMostInt8 ? -kMostInt8 : step;
    record[f.mean + block * kCodes + c] = static_cast<uint8_t>(static_cast<int8_t>(step));
    const float offset = static_cast<float>(static_cast<int8_t>(step)) * scale;
    for (int t = 0; t < kTileTokens; ++t)
      tokens[c * kTileTokens + t] = tokens[c * kTileTokens + t] - offset;
  }
}

void encode_channels(const Kernels& kernels, const XLayout& f, XBuffer& b, uint8_t* record) {
  alignas(64) float z[kCodes];
  for (int64_t block = 0; block < f.groups(); ++block) {
    const float* rows = b.rows.data() + block * kCodes;
    for (int t = 0; t < kTileTokens; ++t)
      for (int c = 0; c < kCodes; ++c) b.group[c * kTileTokens + t] = rows[t * f.channels + c];
    take_means(f, block, b.group.data(), record);
    for (int64_t i = 0; i < kCodes; ++i) {
      const int64_t channel = block * kCodes + i;
      std::memcpy(z, b.group.data() + i * kTileTokens, sizeof(z));
      encode_group(kernels, f.bits, z, record + 2 * channel,
                   record + f.code + channel * kTileTokens * f.bits / 8);
    }
  }
}

void decode_channels(const Kernels& kernels, const XLayout& f, const uint8_t* record, XBuffer& b) {
  for (int64_t block = 0; block < f.groups(); ++block) {
    const int64_t first = block * kCodes;
    const float mean_scale = load_half(record + f.mean_scale + 2 * block);
    kernels.x->decode_groups(record + f.code + first * kTileTokens * f.bits / 8, record + 2 * first,
                             kCodes, f.bits, b.group.data());
    float offset[kCodes];
    for (int c = 0; c < kCodes; ++c)
      offset[c] = static_cast<float>(static_cast<int8_t>(record[f.mean + first + c])) * mean_scale;
    kernels.x->transpose(b.group.data(), offset, b.rows.data() + first, f.channels);
  }
}

}  // namespace

bool valid_x_bits(int64_t bits) {
  return bits == 2 || bits == 3 || bits == 4 || bits == kEightBits || bits == kPassThroughBits;
}

bool valid_channels(int64_t channels) { return channels >= kCodes && channels % kCodes == 0; }

XLayout make_x_layout(int64_t channels, int bits, bool per_channel, int itemsize) {
  XLayout f{};
  f.channels = channels;
  f.bits = bits;
  f.per_channel = per_channel;
  if (bits == kPassThroughBits) {
    f.record_bytes = kTileTokens * channels * itemsize;
    return f;
  }
  f.mean = 2 * channels;
  f.mean_scale = f.mean + channels;
  f.code = per_channel ? f.mean_scale + 2 * f.groups() : 2 * channels;
  f.record_bytes = f.code + kTileTokens * channels * bits / 8;
  return f;
}

XBuffer::XBuffer(const XLayout& f)
    : rows(kTileTokens * f.channels), group(static_cast<size_t>(kCodes) * kTileTokens) {}

void encode_x(const Kernels& kernels, const XLayout& f, bool rotate, XBuffer& b, uint8_t* record) {
  const Rotation rotation = blocks_of(f.channels);
  for (int t = 0; rotate && t < kTileTokens; ++t)
    kernels.transform->fwht(b.rows.data() + t * f.channels, rotation);
  if (f.per_channel) {
    encode_channels(kernels, f, b, record);
  } else {
    encode_tokens(kernels, f, b, record);
  }
}

void decode_x(const Kernels& kernels, const XLayout& f, bool rotate, const uint8_t* record,
              XBuffer& b, Float type, uint8_t* out) {
  const Rotation rotation = blocks_of(f.channels);
  if (f.per_channel) decode_channels(kernels, f, record, b);
  for (int64_t t = 0; t < kTileTokens; ++t) {
    float* row = b.rows.data() + (f.per_channel ? t * f.channels : 0);
    if (!f.per_channel)
      kernels.x->decode_groups(record + f.code + t * f.channels * f.bits / 8,
                               record + 2 * t * f.groups(), f.groups(), f.bits, row);
    if (rotate) kernels.transform->fwht_inverse(row, rotation);
    kernels.transform->store(row, out + t * f.channels * size_of(type), type, f.channels);
  }
}

}  // namespace kvq
