// Packed lines to bytes: the 64 codes (16 lanes by 4 elements) of several units at a time.
// Included inside the target region, after lanes.h.
#pragma once

namespace kvq::avx512vnni {
namespace {

inline __m512i load64(const uint8_t* p) { return _mm512_loadu_si512(p); }

// What a byte permutation looks up: the level of the bits of an index from kShift on, plus an
// offset.
template <int kBits, int kOffset, int kShift>
struct LevelTable {
  alignas(64) int8_t byte[64];
  constexpr LevelTable() : byte() {
    for (int i = 0; i < 64; ++i)
      byte[i] = static_cast<int8_t>(level_of(kBits, i >> kShift & ((1 << kBits) - 1)) + kOffset);
  }
};

template <int kBits, int kOffset, int kShift>
inline __m512i level_table() {
  static constexpr LevelTable<kBits, kOffset, kShift> table;
  return _mm512_load_si512(table.byte);
}

// The kUnits units of one step as level + offset; steps follow each other in unit order.
template <int kBits, int kOffset>
struct Decoder;

template <int kOffset>
struct Decoder<4, kOffset> {
  static constexpr int kBits = 4;
  static constexpr int kUnits = 2;
  __m512i table, mask;

  Decoder() {
    table = level_table<4, kOffset, 0>();
    mask = _mm512_set1_epi8(15);
  }
  inline void operator()(const uint8_t* packed, int step, __m512i* out) const {
    const __m512i x = load64(packed + step * 64);
    out[0] = _mm512_shuffle_epi8(table, _mm512_and_si512(x, mask));
    out[1] = _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi16(x, 4), mask));
  }
};

template <int kOffset>
struct Decoder<2, kOffset> {
  static constexpr int kBits = 2;
  static constexpr int kUnits = 4;
  // A nibble holds two codes: one table reads its low pair of bits, one its high pair.
  __m512i low, high, mask;

  Decoder() {
    low = level_table<2, kOffset, 0>();
    high = level_table<2, kOffset, 2>();
    mask = _mm512_set1_epi8(15);
  }
  inline void operator()(const uint8_t* packed, int step, __m512i* out) const {
    const __m512i x = load64(packed + step * 64);
    const __m512i a = _mm512_and_si512(x, mask);
    const __m512i b = _mm512_and_si512(_mm512_srli_epi16(x, 4), mask);
    out[0] = _mm512_shuffle_epi8(low, a);
    out[1] = _mm512_shuffle_epi8(high, a);
    out[2] = _mm512_shuffle_epi8(low, b);
    out[3] = _mm512_shuffle_epi8(high, b);
  }
};

template <int kOffset>
struct Decoder<3, kOffset> {
  static constexpr int kBits = 3;
  static constexpr int kUnits = 4;
  __m512i table, mask;

  Decoder() {
    table = level_table<3, kOffset, 0>();
    mask = _mm512_set1_epi8(3);
  }
  // Bits above the third do not matter: the table repeats itself.
  inline __m512i look(__m512i low, __m512i high) const {
    return _mm512_permutexvar_epi8(_mm512_ternarylogic_epi32(mask, low, high, 0xCA), table);
  }
  inline void operator()(const uint8_t* packed, int step, __m512i* out) const {
    const uint8_t* group = packed + (step >> 1) * 192;  // a group holds two steps
    const __m512i x = load64(group + (step & 1) * 64);
    const __m512i h = _mm512_srl_epi16(load64(group + 128), _mm_cvtsi32_si128(4 * (step & 1)));
    out[0] = look(x, _mm512_slli_epi16(h, 2));
    out[1] = look(_mm512_srli_epi16(x, 2), _mm512_slli_epi16(h, 1));
    out[2] = look(_mm512_srli_epi16(x, 4), h);
    out[3] = look(_mm512_srli_epi16(x, 6), _mm512_srli_epi16(h, 1));
  }
};

}  // namespace
}  // namespace kvq::avx512vnni
