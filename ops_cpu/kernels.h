// The function table that every instruction set fills. Kernels take raw pointers, allocate nothing
// and know neither torch nor the cache; a vector's floats are summed in the order of
// docs/formats.md, so that the tiers agree bit for bit.
#pragma once
#include <cstdint>

#include "ops_cpu/format.h"

namespace kvq {

enum class Float : int32_t { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2 };
constexpr int64_t size_of(Float type) { return type == Float::kFloat32 ? 4 : 2; }

// Rows of queries attended together; a packed line is decoded once for several of them.
constexpr int kMaxRows = 16;

// Integer queries and weights: 14 bits in exact mode, held as int16, or 7 bits, held as bytes.
// Exact sums are the same integers on every tier; 14 bits also split into two 7-bit planes.
constexpr int kQueryLimitExact = 8127;  // 63 * 128 + 63
constexpr int kQueryLimitFast = 63;
constexpr int kWeightLimitExact = 16383;
constexpr int kWeightLimitFast = 127;
constexpr int integer_bytes(bool exact) { return exact ? 2 : 1; }

// Queries and weights whose largest element is below this are zero: its inverse would overflow.
constexpr float kSmallestMagnitude = 1e-30f;

struct TransformKernels {
  void (*load)(const void* in, Float type, float* out, int64_t count);
  // What is encoded: NaN as 0, the rest within +-kLargestInput; `dim` channels.
  void (*load_bounded)(const void* in, Float type, float* out, int dim);
  void (*store)(const float* in, void* out, Float type, int64_t count);
  void (*fwht)(float* x, const Rotation& rotation);          // x <- H x
  void (*fwht_inverse)(float* x, const Rotation& rotation);  // x <- H' x
};

// The rotated vector z is 64-byte aligned and padded with zeros to a multiple of 64 channels.
struct EncodeKernels {
  float (*sum_of_squares)(const float* z, int dim);
  // <z, c> and <c, c>, c the levels of the codes of z * step.
  void (*try_step)(const float* z, int dim, int bits, float step, float* product, float* norm);
  // Those codes, a byte each.
  void (*write_codes)(const float* z, int dim, int bits, float step, uint8_t* codes);
};

// The running softmax of one query row; scores are in units of log 2.
struct Softmax {
  float max;
  float lanes[16];  // the sum of the weights, by token modulo 16
};

struct SoftmaxKernels {
  // p[rows, 64] = 2^(scores - max), after moving the maximum, the sum and acc[rows, dim] to the
  // new maximum; zeros where all scores of a row are -inf.
  void (*softmax)(const float* scores, Softmax* states, float* acc, int dim, int rows, float* p);
};

struct PackedAttentionKernels {
  // Integers of a query row, integer_bytes(exact) * dim bytes in the tier's own order within each
  // four channels, with their sum and their unit.
  void (*quantize_query)(const float* x, int dim, bool exact, void* out, int32_t* sum, float* unit);
  // scores[rows, 64] = sum over channels of level * query. `next` is prefetched meanwhile: records
  // of one head lie a page apart, out of reach of the hardware's prefetchers.
  void (*score_tile)(const uint8_t* codes, const uint8_t* next, int dim, int bits,
                     const void* query, bool exact, const int32_t* sums, int rows, int32_t* scores);
  // means[rows] = <query, mean> * mean_scale.
  void (*score_mean)(const float* query, const int8_t* mean, float mean_scale, int dim, int rows,
                     float* means);
  // out[rows, 64] = scores * (key_scale * unit) + mean.
  void (*scale_scores)(const int32_t* scores, const uint16_t* key_scales, const float* units,
                       const float* means, int rows, float* out);
  // Integers of p * value_scale, ordered within each four tokens like a query, their sums and
  // their units, 0 when all are zero.
  void (*quantize_weights)(const float* p, const uint16_t* value_scales, bool exact, int rows,
                           void* out, int32_t* sums, float* units);
  // acc[rows, dim] += unit * sum over tokens of level * weight, prefetching `next`.
  void (*accumulate_tile)(const uint8_t* codes, const uint8_t* next, int dim, int bits,
                          const void* weights, bool exact, const int32_t* sums, const float* units,
                          int rows, float* acc);
};

struct ExactAttentionKernels {
  // scores[rows, 64] of up to 64 exact keys, `stride` elements apart. Their values, `value_bytes`
  // every `value_step` bytes, are prefetched meanwhile.
  void (*score_exact)(const void* keys, Float type, int64_t stride, int tokens, int dim,
                      const float* query, int rows, const uint8_t* values, int64_t value_step,
                      int value_bytes, float* scores);
  // acc[rows, dim] += p[rows, 64] * values; with `skip_zero` a value of weight 0 is not read.
  void (*accumulate_exact)(const void* values, Float type, int64_t stride, int tokens, int dim,
                           const float* p, int rows, bool skip_zero, float* acc);
};

// Steps between the 16 levels of a far value, the odd numbers from -15 to 15.
constexpr int kFarValueSteps = 15;

// A far token is encoded alone; its vector has `dim` channels without NaN.
struct FarEncodeKernels {
  float (*largest)(const float* x, int dim);  // magnitude
  void (*range)(const float* x, int dim, float* low, float* high);
  // E4M3 codes of x / scale, saturated; those of 0 when the scale is 0.
  void (*write_fp8)(const float* x, int dim, float scale, uint8_t* codes);
  // Codes of the levels nearest to (x - middle) / scale; 8 when the scale is 0.
  void (*write_int4)(const float* x, int dim, float middle, float scale, uint8_t* codes);
};

// Tokens whose values are read or left together: what a line of value codes holds.
constexpr int kGroupTokens = 8;
constexpr int kSelectTiles = 16;
constexpr int kAllGroups = (1 << (kTileTokens / kGroupTokens)) - 1;

struct FarAttentionKernels {
  // scores[rows, 64] = <query, key> of a tile of fp8 keys. The products of channels c, c + 4, ...
  // are added by fused multiply-add, the four sums as (0 + 1) + (2 + 3), times the scale.
  void (*score_fp8)(const uint8_t* codes, const uint8_t* next, const uint16_t* key_scales, int dim,
                    const float* query, int rows, float* scores);
  // offsets[rows] = sum over tokens of p * middle.
  void (*weigh_middles)(const float* p, const uint16_t* middles, int rows, float* offsets);
  // acc[rows, dim] += unit * sum over tokens of level * weight + offset. The weights are those of
  // quantize_weights in exact mode; values of groups whose bit is not set are not read.
  void (*accumulate_int4)(const uint8_t* codes, const uint8_t* next, int dim, const void* weights,
                          const int32_t* sums, const float* units, const float* offsets, int groups,
                          int rows, float* acc);
  // The groups in which a row has a weight of at least `bound`, or NaN; weights of others become 0.
  int (*needed_groups)(float* p, int rows, float bound);
  // Places of scores above `floor`, in order, the `wanted` greatest among them; others may be left
  // out. The scores are 64 for each of up to kSelectTiles tiles, `stride` apart, a place is
  // 64 * tile + token. Returns how many.
  int (*select)(const float* scores, int64_t stride, int tiles, int wanted, float floor,
                int16_t* places);
};

// Codes of a group of a layer input: channels of a token, or tokens of a channel.
constexpr int kGroupCodes = 64;

struct XKernels {
  // out[count, 64] = level * scale of packed groups that lie one after the other; the scales are
  // float16, not aligned.
  void (*decode_groups)(const uint8_t* packed, const uint8_t* scales, int64_t count, int bits,
                        float* out);
  // rows[t * stride + c] = group[c * 64 + t] + offset[c].
  void (*transpose)(const float* group, const float* offset, float* rows, int64_t stride);
  // The 64 codes of x / scale within +-127; those of 0 when the scale is 0.
  void (*write_int8)(const float* x, float scale, uint8_t* codes);
};

struct Kernels {
  const char* name;
  const TransformKernels* transform;
  const EncodeKernels* encode;
  const SoftmaxKernels* softmax;
  const PackedAttentionKernels* packed;
  const ExactAttentionKernels* exact;
  const FarEncodeKernels* far_encode;
  const FarAttentionKernels* far;
  const XKernels* x;
};

namespace scalar {
extern const TransformKernels transform;
extern const EncodeKernels encode;
extern const SoftmaxKernels softmax;
extern const PackedAttentionKernels packed_attention;
extern const ExactAttentionKernels exact_attention;
extern const FarEncodeKernels far_encode;
extern const FarAttentionKernels far_attention;
extern const XKernels x;
}  // namespace scalar
namespace avx2 {
extern const TransformKernels transform;
extern const EncodeKernels encode;
extern const SoftmaxKernels softmax;
extern const PackedAttentionKernels packed_attention;
extern const ExactAttentionKernels exact_attention;
extern const FarEncodeKernels far_encode;
extern const FarAttentionKernels far_attention;
extern const XKernels x;
}  // namespace avx2
namespace avx512vnni {
extern const TransformKernels transform;
extern const EncodeKernels encode;
extern const SoftmaxKernels softmax;
extern const PackedAttentionKernels packed_attention;
extern const ExactAttentionKernels exact_attention;
extern const FarEncodeKernels far_encode;
extern const FarAttentionKernels far_attention;
extern const XKernels x;
}  // namespace avx512vnni

// Tables of this machine, fastest first, ended by null.
const Kernels* const* available();
// The forced table, or the fastest; throws std::invalid_argument for an unknown forced name.
const Kernels& active();
void force(const char* name);

}  // namespace kvq
