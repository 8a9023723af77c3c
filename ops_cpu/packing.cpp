#include "ops_cpu/packing.h"

#include <cstring>

#include "ops_cpu/format.h"

namespace kvq {
namespace {

constexpr int kLine = 64;

int units_in_group(int bits) { return bits == 4 ? 2 : bits == 2 ? 4 : 8; }
int group_bytes(int bits) { return bits == 3 ? 3 * kLine : kLine; }

// A unit is 16 lanes by 4 elements, gathered into 64 bytes.
void gather_key_unit(const uint8_t* codes, int dim, int unit, uint8_t* out) {
  const int quads = dim / 4;
  const uint8_t* in = codes + (unit / quads) * 16 * dim + (unit % quads) * 4;
  for (int lane = 0; lane < 16; ++lane) std::memcpy(out + 4 * lane, in + lane * dim, 4);
}

void scatter_key_unit(const uint8_t* in, int dim, int unit, uint8_t* codes) {
  const int quads = dim / 4;
  uint8_t* out = codes + (unit / quads) * 16 * dim + (unit % quads) * 4;
  for (int lane = 0; lane < 16; ++lane) std::memcpy(out + lane * dim, in + 4 * lane, 4);
}

void gather_value_unit(const uint8_t* codes, int dim, int unit, uint8_t* out) {
  const uint8_t* in = codes + (unit % 16) * 4 * dim + (unit / 16) * 16;
  for (int lane = 0; lane < 16; ++lane)
    for (int e = 0; e < 4; ++e) out[4 * lane + e] = in[e * dim + lane];
}

void scatter_value_unit(const uint8_t* in, int dim, int unit, uint8_t* codes) {
  uint8_t* out = codes + (unit % 16) * 4 * dim + (unit / 16) * 16;
  for (int lane = 0; lane < 16; ++lane)
    for (int e = 0; e < 4; ++e) out[e * dim + lane] = in[4 * lane + e];
}

// Two bits of each of four units in a byte.
void pack_low_bits(const uint8_t (*units)[kLine], uint8_t* out) {
  for (int b = 0; b < kLine; ++b)
    out[b] = static_cast<uint8_t>((units[0][b] & 3) | (units[1][b] & 3) << 2 |
                                  (units[2][b] & 3) << 4 | (units[3][b] & 3) << 6);
}

void pack_group(const uint8_t (*units)[kLine], int bits, uint8_t* out) {
  if (bits == 4) {
    for (int b = 0; b < kLine; ++b) out[b] = static_cast<uint8_t>(units[0][b] | units[1][b] << 4);
    return;
  }
  pack_low_bits(units, out);
  if (bits == 2) return;
  pack_low_bits(units + 4, out + kLine);
  for (int b = 0; b < kLine; ++b) {
    int high = 0;
    for (int u = 0; u < 8; ++u) high |= (units[u][b] >> 2) << u;
    out[2 * kLine + b] = static_cast<uint8_t>(high);
  }
}

void unpack_group(const uint8_t* in, int bits, uint8_t (*units)[kLine]) {
  for (int b = 0; b < kLine; ++b) {
    if (bits == 4) {
      units[0][b] = in[b] & 15;
      units[1][b] = in[b] >> 4;
      continue;
    }
    for (int u = 0; u < units_in_group(bits); ++u) {
      int code = in[(u >> 2) * kLine + b] >> 2 * (u & 3) & 3;
      if (bits == 3) code |= (in[2 * kLine + b] >> u & 1) << 2;
      units[u][b] = static_cast<uint8_t>(code);
    }
  }
}

template <typename Gather>
void pack(const uint8_t* codes, int dim, int bits, uint8_t* packed, Gather gather) {
  const int units = units_in_group(bits);
  uint8_t group[8][kLine];
  for (int unit = 0; unit < dim; unit += units, packed += group_bytes(bits)) {
    for (int u = 0; u < units; ++u) gather(codes, dim, unit + u, group[u]);
    pack_group(group, bits, packed);
  }
}

template <typename Scatter>
void unpack(const uint8_t* packed, int dim, int bits, uint8_t* codes, Scatter scatter) {
  const int units = units_in_group(bits);
  uint8_t group[8][kLine];
  for (int unit = 0; unit < dim; unit += units, packed += group_bytes(bits)) {
    unpack_group(packed, bits, group);
    for (int u = 0; u < units; ++u) scatter(group[u], dim, unit + u, codes);
  }
}

}  // namespace

void pack_keys(const uint8_t* codes, int dim, int bits, uint8_t* packed) {
  pack(codes, dim, bits, packed, gather_key_unit);
}
void pack_values(const uint8_t* codes, int dim, int bits, uint8_t* packed) {
  pack(codes, dim, bits, packed, gather_value_unit);
}
void unpack_keys(const uint8_t* packed, int dim, int bits, uint8_t* codes) {
  unpack(packed, dim, bits, codes, scatter_key_unit);
}
void unpack_values(const uint8_t* packed, int dim, int bits, uint8_t* codes) {
  unpack(packed, dim, bits, codes, scatter_value_unit);
}

}  // namespace kvq
