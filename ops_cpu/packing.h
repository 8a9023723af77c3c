// Codes of a tile, one byte each, to and from the packed lines of docs/formats.md, "Packing".
#pragma once
#include <cstdint>

namespace kvq {

// codes[64, dim] in token order; packed holds 8 * dim * bits bytes.
void pack_keys(const uint8_t* codes, int dim, int bits, uint8_t* packed);
void pack_values(const uint8_t* codes, int dim, int bits, uint8_t* packed);
void unpack_keys(const uint8_t* packed, int dim, int bits, uint8_t* codes);
void unpack_values(const uint8_t* packed, int dim, int bits, uint8_t* codes);

}  // namespace kvq
