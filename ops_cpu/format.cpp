#include "ops_cpu/format.h"

#include <cmath>
#include <cstdint>
#include <vector>

namespace kvq {
namespace {

constexpr int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

Codebook make_codebook(int bits, double per_sigma) {
  Codebook book{};
  book.count = 1 << bits;
  book.per_sigma = static_cast<float>(per_sigma);
  for (int i = 0; i < book.count; ++i) book.level[i] = level_of(bits, i);
  for (int i = 0; i + 1 < book.count; ++i)
    book.midpoint[i] = 0.5f * static_cast<float>(book.level[i] + book.level[i + 1]);
  return book;
}

// chi[r]: quadratic character modulo the prime q.
std::vector<int> quadratic_character(int q) {
  std::vector<int> chi(q, -1);
  chi[0] = 0;
  for (int x = 1; x < q; ++x) chi[x * x % q] = 1;
  return chi;
}

std::vector<int8_t> paley_first(int q) {
  const std::vector<int> chi = quadratic_character(q);
  const int n = q + 1;
  std::vector<int8_t> h(n * n);
  for (int i = 0; i < n; ++i)
    for (int j = 0; j < n; ++j) {
      int s = 0;
      if (i == 0 && j > 0) s = 1;
      if (i > 0 && j == 0) s = -1;
      if (i > 0 && j > 0) s = chi[(j - i + q) % q];
      h[i * n + j] = static_cast<int8_t>(s + (i == j));
    }
  return h;
}

std::vector<int8_t> paley_second(int q) {
  const std::vector<int> chi = quadratic_character(q);
  const int n = q + 1;
  const int zero[4] = {1, -1, -1, -1}, one[4] = {1, 1, 1, -1};
  std::vector<int8_t> h(4 * n * n);
  for (int i = 0; i < n; ++i)
    for (int j = 0; j < n; ++j) {
      const int c = i == j ? 0 : i == 0 || j == 0 ? 1 : chi[(j - i + q) % q];
      for (int a = 0; a < 2; ++a)
        for (int b = 0; b < 2; ++b)
          h[(2 * i + a) * 2 * n + 2 * j + b] =
              static_cast<int8_t>(c == 0 ? zero[2 * a + b] : c * one[2 * a + b]);
    }
  return h;
}

Rotation make_rotation(int dim) {
  static const std::vector<int8_t> p12 = paley_first(11), p20 = paley_first(19),
                                   p28 = paley_second(13);
  int odd = dim, power = 1;
  while (odd % 2 == 0) odd /= 2, power *= 2;
  Rotation r{dim, 1, power, 0.0f, nullptr};
  if (odd == 3 || odd == 5 || odd == 7) {
    r.order = 4 * odd;
    r.block = power / 4;
    r.matrix = (odd == 3 ? p12 : odd == 5 ? p20 : p28).data();
  }
  r.norm = static_cast<float>(1.0 / std::sqrt(static_cast<double>(r.order * r.block)));
  return r;
}

struct Rotations {
  Rotation of[kMaxHeadDim / 16 + 1];
  Rotations() {
    for (int i = 1; i <= kMaxHeadDim / 16; ++i) of[i] = make_rotation(16 * i);
  }
};

struct Signs {
  float sign[kMaxHeadDim];
  explicit Signs(uint64_t state) {
    for (int i = 0; i < kMaxHeadDim; i += 64) {  // splitmix64
      state += 0x9E3779B97F4A7C15u;
      uint64_t word = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9u;
      word = (word ^ (word >> 27)) * 0x94D049BB133111EBu;
      word ^= word >> 31;
      for (int b = 0; b < 64; ++b) sign[i + b] = word >> b & 1 ? -1.0f : 1.0f;
    }
  }
};

}  // namespace

const Codebook& codebook(int bits) {
  static const Codebook books[3] = {make_codebook(2, 10 / 1.510412),
                                    make_codebook(3, 31 / 2.151925),
                                    make_codebook(4, 63 / 2.732507)};
  return books[bits - 2];
}

Layout make_layout(int key_dim, int value_dim, int key_bits, int value_bits, int itemsize) {
  Layout f{};
  f.key_dim = key_dim;
  f.value_dim = value_dim;
  f.key_bits = key_bits;
  f.value_bits = value_bits;
  const bool raw = f.pass_through();
  const int64_t scales = raw ? 0 : 2 * kTileTokens;
  f.key_scale = 0;
  f.key_code = scales;
  f.value_scale = f.key_code +
                  static_cast<int64_t>(kTileTokens) * key_dim * (raw ? 8 * itemsize : key_bits) / 8;
  f.value_code = f.value_scale + scales;
  f.mean = f.value_code +
           static_cast<int64_t>(kTileTokens) * value_dim * (raw ? 8 * itemsize : value_bits) / 8;
  f.mean_scale = f.mean + (raw ? 0 : key_dim);
  f.record_bytes = round_up(f.mean_scale + (raw ? 0 : 2), 64);
  return f;
}

bool valid_head_dim(int64_t dim) {
  return dim >= kMinHeadDim && dim <= kMaxHeadDim && dim % 16 == 0;
}

bool valid_bits(int64_t key_bits, int64_t value_bits) {
  if (key_bits == kPassThroughBits || value_bits == kPassThroughBits) return key_bits == value_bits;
  return key_bits >= 2 && key_bits <= 4 && value_bits >= 2 && value_bits <= 4;
}

const Rotation& rotation(int dim) {
  static const Rotations rotations;
  return rotations.of[dim / 16];
}

const float* key_signs() {
  static const Signs signs(0x6B65797300000001u);
  return signs.sign;
}

const float* value_signs() {
  static const Signs signs(0x76616C7500000001u);
  return signs.sign;
}

int64_t balance_tokens(int64_t sink_tokens, int64_t quantized_start) {
  const int64_t present = quantized_start + 1 - sink_tokens;
  if (present > kBalanceTokens) return kBalanceTokens;
  return present < kTileTokens ? kTileTokens : present;
}

int64_t quantized_tokens(int64_t tokens, int64_t quantized, int64_t sink_tokens,
                         int64_t residual_length, int64_t quantized_start) {
  if (quantized == 0 && tokens <= quantized_start) return 0;
  const int64_t behind = tokens - sink_tokens - residual_length;
  const int64_t due = behind > 0 ? behind / kTileTokens * kTileTokens : 0;
  return due > quantized ? due : quantized;
}

}  // namespace kvq
