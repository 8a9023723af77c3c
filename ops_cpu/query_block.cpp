#include "ops_cpu/query_block.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "ops_cpu/exp2.h"
#include "ops_cpu/half.h"

namespace kvq {
namespace {

constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();

// Additive masks at or below this, such as the smallest float16, mean "not attended".
constexpr float kMaskedBias = -8192.0f;

}  // namespace

void Scratch::prepare(int key_dim, int value_dim) {
  const size_t keys = static_cast<size_t>(kMaxRows) * key_dim;
  if (query.size() < keys) {
    query.resize(keys);
    rotated.resize(keys);
    integers.resize(integer_bytes(true) * keys);
  }
  const size_t values = static_cast<size_t>(kMaxRows) * value_dim;
  if (acc.size() < values) acc.resize(values);
}

Scratch& scratch() {
  static thread_local Scratch instance;
  return instance;
}

QueryBlock::QueryBlock(const Kernels& kernels, const Plan& plan, int64_t item)
    : kernels_(kernels),
      plan_(plan),
      c_(plan.c),
      f_(plan.c.layout),
      s_(scratch()),
      logits_(s_.logits) {
  const int64_t block = item % plan.blocks;
  head_ = item / plan.blocks % c_.kv_heads;
  batch_ = item / plan.blocks / c_.kv_heads;
  row_ = read_row(c_.lengths, batch_);
  first_ = block * kMaxRows;
  rows_ = static_cast<int>(std::min<int64_t>(kMaxRows, plan.rows - first_));
  s_.prepare(f_.key_dim, f_.value_dim);
  for (int r = 0; r < rows_; ++r) {
    const int64_t position = row_.length - c_.queries + query_of(r);
    s_.end[r] = c_.is_causal ? position + 1 : row_.length;
    s_.begin[r] = c_.sliding_window > 0 ? position - c_.sliding_window + 1 : 0;
  }
  load_query();
}

void QueryBlock::load_query() {
  const auto* base = static_cast<const uint8_t*>(c_.query);
  const float scale = c_.scale * kLog2E;
  for (int r = 0; r < rows_; ++r) {
    const int64_t at = batch_ * c_.query_stride[0] + head_of(r) * c_.query_stride[1] +
                       query_of(r) * c_.query_stride[2];
    float* q = s_.query.data() + r * f_.key_dim;
    kernels_.transform->load(base + at * size_of(c_.query_type), c_.query_type, q, f_.key_dim);
    for (int d = 0; d < f_.key_dim; ++d) q[d] = q[d] * scale;
  }
}

void QueryBlock::begin_part() {
  std::fill_n(s_.acc.data(), static_cast<int64_t>(rows_) * f_.value_dim, 0.0f);
  for (int r = 0; r < rows_; ++r) {
    s_.softmax[r].max = kNegativeInfinity;
    std::fill_n(s_.softmax[r].lanes, 16, 0.0f);
  }
}

void QueryBlock::rotate_query() {
  if (std::exchange(rotated_, true)) return;
  const float* balance = c_.balance + (batch_ * c_.kv_heads + head_) * f_.key_dim;
  const float* signs = key_signs();
  for (int r = 0; r < rows_; ++r) {
    const float* q = s_.query.data() + r * f_.key_dim;
    float* x = s_.rotated.data() + r * f_.key_dim;
    for (int d = 0; d < f_.key_dim; ++d) x[d] = q[d] / balance[d] * signs[d];
    kernels_.transform->fwht(x, rotation(f_.key_dim));
    kernels_.packed->quantize_query(x, f_.key_dim, c_.exact,
                                    s_.integers.data() + r * f_.key_dim * integer_bytes(c_.exact),
                                    &s_.sums[r], &s_.units[r]);
  }
}

const uint8_t* QueryBlock::record_of(int64_t tile) const {
  const int64_t page = c_.block_table[batch_ * c_.max_pages + tile];
  return c_.tiles + page * c_.tiles_stride[0] + head_ * c_.tiles_stride[1];
}

const uint8_t* QueryBlock::record_after(int64_t tile) const {
  return record_of(std::min(tile + kAhead, row_.tiles - 1));
}

void QueryBlock::prefetch(const uint8_t* record, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; i += 64) __builtin_prefetch(record + i, 0, 2);
}

void QueryBlock::score_tile(const uint8_t* record, const uint8_t* next) {
  const PackedAttentionKernels& k = *kernels_.packed;
  const auto* key_scales = reinterpret_cast<const uint16_t*>(record + f_.key_scale);
  const auto* mean = reinterpret_cast<const int8_t*>(record + f_.mean);
  uint16_t mean_half;
  std::memcpy(&mean_half, record + f_.mean_scale, 2);

  // The kernels prefetch the codes of the next tile; the scales and the mean are left.
  prefetch(next, f_.key_scale, f_.key_code);
  prefetch(next, f_.value_scale, f_.value_code);
  prefetch(next, f_.mean, f_.record_bytes);
  k.score_tile(record + f_.key_code, next + f_.key_code, f_.key_dim, f_.key_bits,
               s_.integers.data(), c_.exact, s_.sums, rows_, s_.scores);
  k.score_mean(s_.query.data(), mean, half_to_float(mean_half), f_.key_dim, rows_, s_.means);
  k.scale_scores(s_.scores, key_scales, s_.units, s_.means, rows_, logits_);
}

void QueryBlock::accumulate_tile(const uint8_t* record, const uint8_t* next) {
  const PackedAttentionKernels& k = *kernels_.packed;
  const auto* value_scales = reinterpret_cast<const uint16_t*>(record + f_.value_scale);
  k.quantize_weights(s_.p, value_scales, c_.exact, rows_, s_.weights, s_.weight_sums, s_.factors);
  k.accumulate_tile(record + f_.value_code, next + f_.value_code, f_.value_dim, f_.value_bits,
                    s_.weights, c_.exact, s_.weight_sums, s_.factors, rows_, s_.acc.data());
}

void QueryBlock::weigh() {
  kernels_.softmax->softmax(logits_, s_.softmax, s_.acc.data(), f_.value_dim, rows_, s_.p);
}

bool QueryBlock::visible(int64_t position, int count) const {
  return position < s_.end[rows_ - 1] && position + count > s_.begin[0];
}

void QueryBlock::mask_row(int r, int64_t position, int count, float* logits) const {
  cap(count, logits);
  if (c_.mask_type != MaskType::kNone) add_mask(r, position, count, logits);
  const int64_t begin = s_.begin[r] - position, end = s_.end[r] - position;
  for (int64_t t = 0; t < std::min<int64_t>(begin, count); ++t) logits[t] = kNegativeInfinity;
  for (int64_t t = std::max<int64_t>(std::min<int64_t>(end, count), 0); t < kTileTokens; ++t)
    logits[t] = kNegativeInfinity;
}

void QueryBlock::cap(int count, float* logits) const {
  if (c_.softcap <= 0.0f) return;
  const float cap = c_.softcap * kLog2E;
  for (int t = 0; t < count; ++t) logits[t] = cap * std::tanh(logits[t] / cap);
}

void QueryBlock::add_mask(int r, int64_t position, int count, float* logits) const {
  const int64_t at = batch_ * c_.mask_stride[0] + head_of(r) * c_.mask_stride[1] +
                     query_of(r) * c_.mask_stride[2] + position;
  if (c_.mask_type == MaskType::kBool) {
    const auto* mask = static_cast<const uint8_t*>(c_.mask) + at;
    // Most tiles of a decoding step are attended throughout.
    if (!std::memchr(mask, 0, count)) return;
    for (int t = 0; t < count; ++t)
      if (!mask[t]) logits[t] = kNegativeInfinity;
    return;
  }
  const Float type = c_.mask_type == MaskType::kFloat32   ? Float::kFloat32
                     : c_.mask_type == MaskType::kFloat16 ? Float::kFloat16
                                                          : Float::kBFloat16;
  alignas(64) float bias[kTileTokens];
  const auto* mask = static_cast<const uint8_t*>(c_.mask) + at * size_of(type);
  kernels_.transform->load(mask, type, bias, count);
  for (int t = 0; t < count; ++t)
    logits[t] = bias[t] > kMaskedBias ? logits[t] + bias[t] * kLog2E : kNegativeInfinity;
}

void QueryBlock::store(float* partial) const {
  for (int r = 0; r < rows_; ++r) {
    float* out = partial + r * plan_.partial_stride;
    std::memcpy(out, s_.acc.data() + r * f_.value_dim, sizeof(float) * f_.value_dim);
    float* lane = s_.softmax[r].lanes;
    for (int half = 8; half >= 1; half /= 2)
      for (int j = 0; j < half; ++j) lane[j] = lane[j] + lane[j + half];
    out[f_.value_dim] = s_.softmax[r].max;
    out[f_.value_dim + 1] = lane[0];
  }
}

}  // namespace kvq
