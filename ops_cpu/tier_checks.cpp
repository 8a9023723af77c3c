#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "ops_cpu/attention_plan.h"
#include "ops_cpu/tiered_attention.h"

namespace kvq {
namespace {

std::string place(const char* name, int64_t row, int64_t head) {
  return std::string(name) + "[" + std::to_string(row) + ", " + std::to_string(head);
}

// The tokens of a head that may still be named, a bit each: promoted ones, and those not far.
struct Unnamed {
  std::vector<uint64_t> promoted, others;

  void start(const Row& row, const int64_t* masks) {
    promoted.resize(row.tiles);
    for (int64_t tile = 0; tile < row.tiles; ++tile) {
      const int64_t held = std::min<int64_t>(row.quantized - tile * kTileTokens, kTileTokens);
      promoted[tile] = static_cast<uint64_t>(masks[tile]) & ~uint64_t{0} >> (kTileTokens - held);
    }
    others.assign((row.tokens - row.quantized + 63) / 64, ~uint64_t{0});
  }

  // Whether the token was there; it no longer is.
  bool take(const TieredCall& c, const Row& row, int64_t token) {
    const int64_t far = token - c.sink_tokens;
    const bool is_far = far >= 0 && far < row.quantized;
    const int64_t at = is_far ? far : far < 0 ? token : token - row.quantized;
    uint64_t& word = (is_far ? promoted : others)[at / 64];
    const uint64_t bit = uint64_t{1} << at % 64;
    const bool found = word & bit;
    word &= ~bit;
    return found;
  }
};

void check_head(const TieredCall& c, const Row& row, int64_t batch, int64_t head,
                Unnamed& unnamed) {
  const int64_t owner = batch * c.kv_heads + head, count = c.near_count[owner];
  if (count < 0 || count > c.capacity)
    throw std::out_of_range(place("near_count", batch, head) + "] must be in [0, " +
                            std::to_string(c.capacity) + "], got " + std::to_string(count));
  unnamed.start(row, c.promoted + owner * c.max_pages);
  const int32_t* index = c.near_index + owner * c.capacity;
  for (int64_t slot = 0; slot < count; ++slot) {
    if (index[slot] < -1 || index[slot] >= row.tokens)
      throw std::out_of_range(place("near_index", batch, head) + ", " + std::to_string(slot) +
                              "] must be in [-1, " + std::to_string(row.tokens) + "), got " +
                              std::to_string(index[slot]));
    if (index[slot] >= 0 && !unnamed.take(c, row, index[slot]))
      throw std::invalid_argument(place("near_index", batch, head) + ", " + std::to_string(slot) +
                                  "] = " + std::to_string(index[slot]) +
                                  " counts twice: it is near in two slots, or far without its bit "
                                  "in promoted");
  }
  for (int64_t tile = 0; tile < row.tiles; ++tile)
    if (const uint64_t bits = unnamed.promoted[tile])
      throw std::invalid_argument(
          place("promoted", batch, head) + "] has the bit of token " +
          std::to_string(c.sink_tokens + tile * kTileTokens + __builtin_ctzll(bits)) +
          " set, which is not near");
}

}  // namespace

void check_near(const TieredCall& c) {
  Unnamed unnamed;
  for (int64_t b = 0; b < c.batch; ++b) {
    const Row row = read_row(c.lengths, b);
    for (int64_t h = 0; h < c.kv_heads; ++h) check_head(c, row, b, h, unnamed);
  }
}

}  // namespace kvq
