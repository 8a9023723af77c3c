// Packed lines to bytes: half a line (8 lanes by 4 elements, 32 bytes) of several units at a time.
// Included inside the target region, after lanes.h.
#pragma once

namespace kvq::avx2 {
namespace {

inline __m256i load32(const uint8_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}

// What a byte shuffle looks up: the level of the bits of a nibble from kShift on, plus an
// offset, in both halves of a register.
template <int kBits, int kOffset, int kShift>
struct LevelTable {
  alignas(32) int8_t byte[32];
  constexpr LevelTable() : byte() {
    for (int i = 0; i < 32; ++i)
      byte[i] =
          static_cast<int8_t>(level_of(kBits, (i & 15) >> kShift & ((1 << kBits) - 1)) + kOffset);
  }
};

template <int kBits, int kOffset, int kShift>
inline __m256i level_table() {
  static constexpr LevelTable<kBits, kOffset, kShift> table;
  return _mm256_load_si256(reinterpret_cast<const __m256i*>(table.byte));
}

// The kUnits units of one step as level + offset; steps follow each other in unit order.
template <int kBits, int kOffset>
struct Decoder;

template <int kOffset>
struct Decoder<4, kOffset> {
  static constexpr int kUnits = 2;
  __m256i table, mask;

  Decoder() {
    table = level_table<4, kOffset, 0>();
    mask = _mm256_set1_epi8(15);
  }
  inline void operator()(const uint8_t* packed, int step, int half, __m256i* out) const {
    const __m256i x = load32(packed + step * 64 + half * 32);
    out[0] = _mm256_shuffle_epi8(table, _mm256_and_si256(x, mask));
    out[1] = _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(x, 4), mask));
  }
};

template <int kOffset>
struct Decoder<2, kOffset> {
  static constexpr int kUnits = 4;
  // A nibble holds two codes: one table reads its low pair of bits, one its high pair.
  __m256i low, high, mask;

  Decoder() {
    low = level_table<2, kOffset, 0>();
    high = level_table<2, kOffset, 2>();
    mask = _mm256_set1_epi8(15);
  }
  inline void operator()(const uint8_t* packed, int step, int half, __m256i* out) const {
    const __m256i x = load32(packed + step * 64 + half * 32);
    const __m256i a = _mm256_and_si256(x, mask);
    const __m256i b = _mm256_and_si256(_mm256_srli_epi16(x, 4), mask);
    out[0] = _mm256_shuffle_epi8(low, a);
    out[1] = _mm256_shuffle_epi8(high, a);
    out[2] = _mm256_shuffle_epi8(low, b);
    out[3] = _mm256_shuffle_epi8(high, b);
  }
};

template <int kOffset>
struct Decoder<3, kOffset> {
  static constexpr int kUnits = 4;
  __m256i table, mask, bit;

  Decoder() {
    table = level_table<3, kOffset, 0>();
    mask = _mm256_set1_epi8(3);
    bit = _mm256_set1_epi8(4);
  }
  inline __m256i look(__m256i low, __m256i high) const {
    return _mm256_shuffle_epi8(
        table, _mm256_or_si256(_mm256_and_si256(low, mask), _mm256_and_si256(high, bit)));
  }
  inline void operator()(const uint8_t* packed, int step, int half, __m256i* out) const {
    const uint8_t* group = packed + (step >> 1) * 192 + half * 32;  // a group holds two steps
    const __m256i x = load32(group + (step & 1) * 64);
    const __m256i h = _mm256_srl_epi16(load32(group + 128), _mm_cvtsi32_si128(4 * (step & 1)));
    out[0] = look(x, _mm256_slli_epi16(h, 2));
    out[1] = look(_mm256_srli_epi16(x, 2), _mm256_slli_epi16(h, 1));
    out[2] = look(_mm256_srli_epi16(x, 4), h);
    out[3] = look(_mm256_srli_epi16(x, 6), _mm256_srli_epi16(h, 1));
  }
};

}  // namespace
}  // namespace kvq::avx2
