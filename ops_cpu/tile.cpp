#include "ops_cpu/tile.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "ops_cpu/half.h"
#include "ops_cpu/packing.h"

namespace kvq {
namespace {

// rows[0, dim] <- sum over `count` (a power of two) rows, halves folded onto each other.
void fold_rows(float* rows, int count, int dim) {
  for (int half = count / 2; half >= 1; half /= 2)
    for (int64_t i = 0; i < static_cast<int64_t>(half) * dim; ++i)
      rows[i] = rows[i] + rows[i + static_cast<int64_t>(half) * dim];
}

float lane_sum(const float* x, int dim) {
  float lane[16];
  for (int j = 0; j < 16; ++j) lane[j] = x[j];
  for (int i = 16; i < dim; i += 16)
    for (int j = 0; j < 16; ++j) lane[j] = lane[j] + x[i + j];
  for (int half = 8; half >= 1; half /= 2)
    for (int j = 0; j < half; ++j) lane[j] = lane[j] + lane[j + half];
  return lane[0];
}

uint16_t load_half(const uint8_t* p) {
  uint16_t h;
  std::memcpy(&h, p, 2);
  return h;
}

void store_half(uint8_t* p, uint16_t h) { std::memcpy(p, &h, 2); }

void write_mean(const Layout& f, TileBuffer& b, uint8_t* record) {
  const int64_t half_tile = kTileTokens / 2 * f.key_dim;
  for (int64_t i = 0; i < half_tile; ++i) b.fold[i] = b.key[i] + b.key[i + half_tile];
  fold_rows(b.fold.data(), kTileTokens / 2, f.key_dim);
  float largest = 0.0f;
  for (int c = 0; c < f.key_dim; ++c) {
    b.fold[c] = b.fold[c] * (1.0f / kTileTokens);
    largest = std::max(largest, std::fabs(b.fold[c]));
  }
  const uint16_t half = float_to_half(largest / 127.0f);
  const float scale = half_to_float(half);
  auto* mean = reinterpret_cast<int8_t*>(record + f.mean);
  for (int c = 0; c < f.key_dim; ++c) {
    const float q = scale > 0.0f ? std::nearbyint(b.fold[c] / scale) : 0.0f;
    mean[c] = static_cast<int8_t>(std::min(127.0f, std::max(-127.0f, q)));
  }
  store_half(record + f.mean_scale, half);
  std::memset(record + f.mean_scale + 2, 0, f.record_bytes - f.mean_scale - 2);
}

// Encodes the rotation of what `prepare` makes of the tokens first..63.
template <typename Prepare>
void encode_rows(const Kernels& kernels, int dim, int bits, int first, Prepare prepare,
                 uint8_t* codes, uint8_t* scales) {
  const Rotation& r = rotation(dim);
  alignas(64) float z[kMaxHeadDim + 64];
  std::fill_n(z + dim, 64, 0.0f);
  float scale[kTileTokens];
  for (int t = first; t < kTileTokens; ++t) {
    prepare(t, z);
    kernels.transform->fwht(z, r);
    scale[t] = encode_vector(*kernels.encode, z, dim, bits, codes + t * dim);
  }
  kernels.transform->store(scale + first, scales + 2 * first, Float::kFloat16, kTileTokens - first);
}

void encode_keys(const Kernels& kernels, const Layout& f, const float* balance, int first,
                 TileBuffer& b, uint8_t* record) {
  float center[kMaxHeadDim], factor[kMaxHeadDim];
  const auto* mean = reinterpret_cast<const int8_t*>(record + f.mean);
  const float scale = half_to_float(load_half(record + f.mean_scale));
  for (int c = 0; c < f.key_dim; ++c) {
    center[c] = static_cast<float>(mean[c]) * scale;
    factor[c] = balance[c] * key_signs()[c];
  }
  const auto prepare = [&](int t, float* z) {
    const float* x = &b.key[t * f.key_dim];
    for (int c = 0; c < f.key_dim; ++c) z[c] = (x[c] - center[c]) * factor[c];
  };
  if (first > 0) unpack_keys(record + f.key_code, f.key_dim, f.key_bits, b.codes.data());
  encode_rows(kernels, f.key_dim, f.key_bits, first, prepare, b.codes.data(), record + f.key_scale);
  pack_keys(b.codes.data(), f.key_dim, f.key_bits, record + f.key_code);
}

void encode_values(const Kernels& kernels, const Layout& f, int first, TileBuffer& b,
                   uint8_t* record) {
  const float* signs = value_signs();
  const auto prepare = [&](int t, float* z) {
    const float* x = &b.value[t * f.value_dim];
    for (int c = 0; c < f.value_dim; ++c) z[c] = x[c] * signs[c];
  };
  if (first > 0) unpack_values(record + f.value_code, f.value_dim, f.value_bits, b.codes.data());
  encode_rows(kernels, f.value_dim, f.value_bits, first, prepare, b.codes.data(),
              record + f.value_scale);
  pack_values(b.codes.data(), f.value_dim, f.value_bits, record + f.value_code);
}

void decode_rows(const Kernels& kernels, const uint8_t* codes, const uint8_t* scales,
                 const float* signs, int dim, int bits, float* rows) {
  const Rotation& r = rotation(dim);
  const Codebook& book = codebook(bits);
  for (int t = 0; t < kTileTokens; ++t) {
    float* x = rows + t * dim;
    const float scale = half_to_float(load_half(scales + 2 * t));
    for (int c = 0; c < dim; ++c) x[c] = scale * book.level[codes[t * dim + c]];
    kernels.transform->fwht_inverse(x, r);
    for (int c = 0; c < dim; ++c) x[c] = x[c] * signs[c];
  }
}

}  // namespace

TileBuffer::TileBuffer(const Layout& f)
    : key(kTileTokens * f.key_dim),
      value(kTileTokens * f.value_dim),
      fold(kTileTokens / 2 * f.key_dim),
      codes(kTileTokens * std::max(f.key_dim, f.value_dim)) {}

float encode_vector(const EncodeKernels& k, const float* z, int dim, int bits, uint8_t* codes) {
  const float rms = std::sqrt(k.sum_of_squares(z, dim) / static_cast<float>(dim));
  const float per_sigma = codebook(bits).per_sigma;

  // All are tried before one is chosen: a branch for each would be mispredicted half of the time.
  float step[kScaleCandidates], product[kScaleCandidates], norm[kScaleCandidates];
  for (int g = 0; g < kScaleCandidates; ++g) {
    step[g] = rms > 0.0f ? per_sigma / (rms * kScaleCandidate[g]) : 0.0f;
    k.try_step(z, dim, bits, step[g], &product[g], &norm[g]);
  }
  int best = 0;
  float best_gain = product[0] * product[0] / norm[0];
  for (int g = 1; g < kScaleCandidates; ++g) {
    const float gain = product[g] * product[g] / norm[g];
    if (gain > best_gain) {
      best_gain = gain;
      best = g;
    }
  }
  k.write_codes(z, dim, bits, step[best], codes);
  const float scale = rms > 0.0f ? product[best] / norm[best] : 0.0f;
  return std::min(scale, kLargestInput);
}

void encode_tile(const Kernels& kernels, const Layout& f, const float* balance, int first,
                 TileBuffer& b, uint8_t* record) {
  if (first == 0) write_mean(f, b, record);
  encode_keys(kernels, f, balance, first, b, record);
  encode_values(kernels, f, first, b, record);
}

void decode_tile(const Kernels& kernels, const Layout& f, const float* balance,
                 const uint8_t* record, TileBuffer& b) {
  unpack_keys(record + f.key_code, f.key_dim, f.key_bits, b.codes.data());
  decode_rows(kernels, b.codes.data(), record + f.key_scale, key_signs(), f.key_dim, f.key_bits,
              b.key.data());
  const auto* mean = reinterpret_cast<const int8_t*>(record + f.mean);
  const float scale = half_to_float(load_half(record + f.mean_scale));
  for (int t = 0; t < kTileTokens; ++t)
    for (int c = 0; c < f.key_dim; ++c) {
      float& x = b.key[t * f.key_dim + c];
      x = x / balance[c] + static_cast<float>(mean[c]) * scale;
    }
  unpack_values(record + f.value_code, f.value_dim, f.value_bits, b.codes.data());
  decode_rows(kernels, b.codes.data(), record + f.value_scale, value_signs(), f.value_dim,
              f.value_bits, b.value.data());
}

void key_balance(float* rows, int count, int dim, float* balance) {
  const int64_t used = static_cast<int64_t>(count) * dim, all = kBalanceFold * dim;
  std::fill(rows + used, rows + all, 0.0f);
  std::vector<float> fold(rows, rows + all);
  fold_rows(fold.data(), kBalanceFold, dim);
  for (int c = 0; c < dim; ++c) fold[c] = fold[c] / static_cast<float>(count);
  for (int t = 0; t < count; ++t)
    for (int c = 0; c < dim; ++c) {
      const float deviation = rows[t * dim + c] - fold[c];
      rows[t * dim + c] = deviation * deviation;
    }
  fold_rows(rows, kBalanceFold, dim);
  for (int c = 0; c < dim; ++c) rows[c] = rows[c] / static_cast<float>(count);
  const float mean = lane_sum(rows, dim) / static_cast<float>(dim);
  const float floor = kVarianceFloor * mean;
  for (int c = 0; c < dim; ++c)
    balance[c] = floor > 0.0f ? 1.0f / std::sqrt(std::sqrt(std::max(rows[c], floor))) : 1.0f;
}

}  // namespace kvq
