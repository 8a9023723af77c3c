#include "ops_cpu/far.h"

#include <algorithm>
#include <cstring>

#include "ops_cpu/e4m3.h"
#include "ops_cpu/packing.h"

namespace kvq {
namespace {

void store_half(uint8_t* p, uint16_t h) { std::memcpy(p, &h, 2); }

float load_half(const uint8_t* p) {
  uint16_t h;
  std::memcpy(&h, p, 2);
  return half_to_float(h);
}

// Pairs of channels of four tokens side by side; see fp8_place.
void pack_fp8(const uint8_t* codes, int dim, uint8_t* packed) {
  for (int t = 0; t < kTileTokens; ++t)
    for (int c = 0; c < dim; c += 2)
      std::memcpy(packed + fp8_place(t, c, dim), codes + t * dim + c, 2);
}

void encode_keys(const FarEncodeKernels& k, const FarLayout& f, FarBuffer& b, uint8_t* record) {
  for (int t = 0; t < kTileTokens; ++t) {
    const float* x = b.key.data() + t * f.key_dim;
    const uint16_t scale = float_to_half(k.largest(x, f.key_dim) / kLargestE4M3);
    store_half(record + f.key_scale + 2 * t, scale);
    k.write_fp8(x, f.key_dim, half_to_float(scale), b.codes.data() + t * f.key_dim);
  }
  pack_fp8(b.codes.data(), f.key_dim, record + f.key_code);
}

void encode_values(const FarEncodeKernels& k, const FarLayout& f, FarBuffer& b, uint8_t* record) {
  for (int t = 0; t < kTileTokens; ++t) {
    const float* x = b.value.data() + t * f.value_dim;
    float low, high;
    k.range(x, f.value_dim, &low, &high);
    // Adding 0 makes zeros positive, whose signs would depend on the order of the channels.
    const uint16_t middle = float_to_half((low + high) * 0.5f + 0.0f);
    const uint16_t scale = float_to_half((high - low) / (2.0f * kFarValueSteps) + 0.0f);
    store_half(record + f.value_middle + 2 * t, middle);
    store_half(record + f.value_scale + 2 * t, scale);
    k.write_int4(x, f.value_dim, half_to_float(middle), half_to_float(scale),
                 b.codes.data() + t * f.value_dim);
  }
  pack_values(b.codes.data(), f.value_dim, 4, record + f.value_code);
}

}  // namespace

FarLayout make_far_layout(int key_dim, int value_dim) {
  FarLayout f{};
  f.key_dim = key_dim;
  f.value_dim = value_dim;
  f.key_code = 2 * kTileTokens;
  f.value_scale = f.key_code + static_cast<int64_t>(kTileTokens) * key_dim;
  f.value_middle = f.value_scale + 2 * kTileTokens;
  f.value_code = f.value_middle + 2 * kTileTokens;
  f.record_bytes = f.value_code + static_cast<int64_t>(kTileTokens) * value_dim / 2;
  return f;
}

FarBuffer::FarBuffer(const FarLayout& f)
    : key(kTileTokens * f.key_dim),
      value(kTileTokens * f.value_dim),
      codes(kTileTokens * std::max(f.key_dim, f.value_dim)) {}

void encode_far(const Kernels& kernels, const FarLayout& f, FarBuffer& b, uint8_t* record) {
  encode_keys(*kernels.far_encode, f, b, record);
  encode_values(*kernels.far_encode, f, b, record);
}

void decode_far(const FarLayout& f, const uint8_t* record, FarBuffer& b) {
  for (int t = 0; t < kTileTokens; ++t) {
    const float scale = load_half(record + f.key_scale + 2 * t);
    for (int c = 0; c < f.key_dim; ++c)
      b.key[t * f.key_dim + c] =
          e4m3_to_float(record[f.key_code + fp8_place(t, c, f.key_dim)]) * scale;
  }
  unpack_values(record + f.value_code, f.value_dim, 4, b.codes.data());
  for (int t = 0; t < kTileTokens; ++t) {
    const float scale = load_half(record + f.value_scale + 2 * t);
    const float middle = load_half(record + f.value_middle + 2 * t);
    for (int c = 0; c < f.value_dim; ++c) {
      const int level = 2 * b.codes[t * f.value_dim + c] - kFarValueSteps;
      b.value[t * f.value_dim + c] = static_cast<float>(level) * scale + middle;
    }
  }
}

}  // namespace kvq
