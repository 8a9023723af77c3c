#include <cmath>

#include "ops_cpu/half.h"
#include "ops_cpu/kernels.h"

namespace kvq::scalar {
namespace {

void unpack_levels(const uint8_t* packed, int bits, float* levels) {
  for (int i = 0; i < kGroupCodes; ++i) {
    if (bits == 8) {
      levels[i] = static_cast<float>(static_cast<int8_t>(packed[i]));
    } else if (bits == 4) {
      levels[i] = kLevels4[packed[i & 31] >> (i >> 5) * 4 & 15];
    } else {
      const int low = packed[i & 15] >> (i >> 4) * 2 & 3;
      const int high = bits == 3 ? packed[16 + (i >> 3)] >> (i & 7) & 1 : 0;
      levels[i] = level_of(bits, low | high << 2);
    }
  }
}

void decode_groups(const uint8_t* packed, const uint8_t* scales, int64_t count, int bits,
                   float* out) {
  for (int64_t g = 0; g < count; ++g) {
    uint16_t half;
    std::memcpy(&half, scales + 2 * g, 2);
    const float scale = half_to_float(half);
    float* z = out + g * kGroupCodes;
    unpack_levels(packed + g * kGroupCodes * bits / 8, bits, z);
    for (int i = 0; i < kGroupCodes; ++i) z[i] = z[i] * scale;
  }
}

void transpose(const float* group, const float* offset, float* rows, int64_t stride) {
  for (int t = 0; t < kTileTokens; ++t)
    for (int c = 0; c < kGroupCodes; ++c)
      rows[t * stride + c] = group[c * kTileTokens + t] + offset[c];
}

void write_int8(const float* x, float scale, uint8_t* codes) {
  for (int i = 0; i < kGroupCodes; ++i) {
    const float step = scale > 0.0f ? std::nearbyint(x[i] / scale) : 0.0f;
    const float code = step > 127.0f ? 127.0f : step < -127.0f ? -127.0f : step;
    codes[i] = static_cast<uint8_t>(static_cast<int8_t>(code));
  }
}

}  // namespace

const XKernels x{decode_groups, transpose, write_int8};

}  // namespace kvq::scalar
