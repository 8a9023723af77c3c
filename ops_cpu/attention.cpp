#include "ops_cpu/attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "ops_cpu/attention_plan.h"
#include "ops_cpu/exp2.h"
#include "ops_cpu/half.h"

namespace kvq {
namespace {

constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();

// Additive masks at or below this, such as the smallest float16, mean "not attended".
constexpr float kMaskedBias = -8192.0f;

// Partial results that a thread keeps room for.
constexpr int64_t kKeptFloats = 32768;

// Tiles between one that is attended to and the one that is prefetched into the second cache.
constexpr int64_t kAhead = 2;

// Scratch of one thread; reused over its units and calls.
struct Scratch {
  std::vector<float> query, rotated, acc;
  std::vector<uint8_t> integers;  // of the queries
  alignas(64) int32_t scores[kMaxRows * kTileTokens];
  alignas(64) float logits[kMaxRows * kTileTokens];
  alignas(64) float p[kMaxRows * kTileTokens];
  alignas(64) uint8_t weights[kMaxRows * kTileTokens * integer_bytes(true)];
  int32_t sums[kMaxRows], weight_sums[kMaxRows];
  float units[kMaxRows], means[kMaxRows], factors[kMaxRows];
  int64_t begin[kMaxRows], end[kMaxRows];  // positions that the causal mask and the window leave
  Softmax softmax[kMaxRows];

  void prepare(int key_dim, int value_dim) {
    const size_t keys = static_cast<size_t>(kMaxRows) * key_dim;
    if (query.size() < keys) {
      query.resize(keys);
      rotated.resize(keys);
      integers.resize(integer_bytes(true) * keys);
    }
    const size_t values = static_cast<size_t>(kMaxRows) * value_dim;
    if (acc.size() < values) acc.resize(values);
  }
};

Scratch& scratch() {
  static thread_local Scratch instance;
  return instance;
}

// One block of query rows against one part of the tokens.
class Unit {
 public:
  Unit(const Kernels& kernels, const Plan& plan, int64_t item)
      : kernels_(kernels), plan_(plan), c_(plan.c), f_(plan.c.layout), s_(scratch()) {
    const int64_t block = item % plan.blocks;
    head_ = item / plan.blocks % c_.kv_heads;
    batch_ = item / plan.blocks / c_.kv_heads;
    row_ = read_row(c_.lengths, batch_);
    first_ = block * kMaxRows;
    rows_ = static_cast<int>(std::min<int64_t>(kMaxRows, plan.rows - first_));
    s_.prepare(f_.key_dim, f_.value_dim);
    std::fill_n(s_.acc.data(), static_cast<int64_t>(rows_) * f_.value_dim, 0.0f);
    for (int r = 0; r < rows_; ++r) {
      s_.softmax[r].max = kNegativeInfinity;
      std::fill_n(s_.softmax[r].lanes, 16, 0.0f);
      const int64_t position = row_.length - c_.queries + query_of(r);
      s_.end[r] = c_.is_causal ? position + 1 : row_.length;
      s_.begin[r] = c_.sliding_window > 0 ? position - c_.sliding_window + 1 : 0;
    }
    load_query();
  }

  void run(int64_t split, float* partial) {
    if (split < plan_.splits) {
      const int64_t first = first_tile(c_, row_), tiles = row_.tiles - first;
      attend_tiles(first, first + tiles * split / plan_.splits,
                   first + tiles * (split + 1) / plan_.splits);
    } else {
      attend_exact();
    }
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

 private:
  int64_t query_of(int r) const { return (first_ + r) / plan_.group; }
  int64_t head_of(int r) const { return head_ * plan_.group + (first_ + r) % plan_.group; }

  void load_query() {
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

  void rotate_query() {
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

  void attend_tiles(int64_t first, int64_t begin, int64_t end) {
    if (begin >= end) return;
    // Tiles prefetch those that follow, also across splits; nothing precedes the first.
    for (int64_t tile = first; begin == first && tile < std::min(first + kAhead, end); ++tile)
      prefetch(record_of(tile), 0, f_.record_bytes);
    rotate_query();
    for (int64_t tile = begin; tile < end; ++tile) {
      const int64_t token = c_.sink_tokens + tile * kTileTokens;
      const int64_t left = c_.sink_tokens + row_.quantized - token;
      const int count = static_cast<int>(std::min<int64_t>(kTileTokens, left));
      if (!visible(row_.start + token, count)) continue;
      attend_tile(record_of(tile), record_of(std::min(tile + kAhead, row_.tiles - 1)),
                  row_.start + token, count);
    }
  }

  const uint8_t* record_of(int64_t tile) const {
    const int64_t page = c_.block_table[batch_ * c_.max_pages + tile];
    return c_.tiles + page * c_.tiles_stride[0] + head_ * c_.tiles_stride[1];
  }

  static void prefetch(const uint8_t* record, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i += 64) __builtin_prefetch(record + i, 0, 2);
  }

  // The kernels prefetch the codes of the next tile; the scales and the mean are left.
  void prefetch_metadata(const uint8_t* next) const {
    prefetch(next, f_.key_scale, f_.key_code);
    prefetch(next, f_.value_scale, f_.value_code);
    prefetch(next, f_.mean, f_.record_bytes);
  }

  void attend_tile(const uint8_t* record, const uint8_t* next, int64_t position, int count) {
    const PackedAttentionKernels& k = *kernels_.packed;
    const auto* key_scales = reinterpret_cast<const uint16_t*>(record + f_.key_scale);
    const auto* value_scales = reinterpret_cast<const uint16_t*>(record + f_.value_scale);
    const auto* mean = reinterpret_cast<const int8_t*>(record + f_.mean);
    uint16_t mean_half;
    std::memcpy(&mean_half, record + f_.mean_scale, 2);
    const float mean_scale = half_to_float(mean_half);

    prefetch_metadata(next);
    k.score_tile(record + f_.key_code, next + f_.key_code, f_.key_dim, f_.key_bits,
                 s_.integers.data(), c_.exact, s_.sums, rows_, s_.scores);
    k.score_mean(s_.query.data(), mean, mean_scale, f_.key_dim, rows_, s_.means);
    k.scale_scores(s_.scores, key_scales, s_.units, s_.means, rows_, s_.logits);
    for (int r = 0; r < rows_; ++r) mask_row(r, position, count, s_.logits + r * kTileTokens);
    kernels_.softmax->softmax(s_.logits, s_.softmax, s_.acc.data(), f_.value_dim, rows_, s_.p);
    k.quantize_weights(s_.p, value_scales, c_.exact, rows_, s_.weights, s_.weight_sums, s_.factors);
    k.accumulate_tile(record + f_.value_code, next + f_.value_code, f_.value_dim, f_.value_bits,
                      s_.weights, c_.exact, s_.weight_sums, s_.factors, rows_, s_.acc.data());
  }

  void attend_exact() {
    const auto* key = static_cast<const uint8_t*>(c_.exact_key);
    const auto* value = static_cast<const uint8_t*>(c_.exact_value);
    const int64_t item = size_of(c_.type);
    key += (batch_ * c_.exact_key_stride[0] + head_ * c_.exact_key_stride[1]) * item;
    value += (batch_ * c_.exact_value_stride[0] + head_ * c_.exact_value_stride[1]) * item;
    const int64_t key_step = c_.exact_key_stride[2], value_step = c_.exact_value_stride[2];

    const int64_t sinks = row_.quantized ? c_.sink_tokens : row_.tokens;
    attend_rows(key, key_step, value, value_step, 0, sinks);
    if (row_.quantized == 0) return;
    if (f_.pass_through()) {
      for (int64_t tile = 0; tile < row_.tiles; ++tile) {
        const uint8_t* record = record_of(tile);
        attend_rows(record + f_.key_code, f_.key_dim, record + f_.value_code, f_.value_dim,
                    c_.sink_tokens + tile * kTileTokens,
                    std::min<int64_t>(kTileTokens, row_.quantized - tile * kTileTokens));
      }
    }
    attend_rows(key + sinks * key_step * item, key_step, value + sinks * value_step * item,
                value_step, c_.sink_tokens + row_.quantized,
                row_.tokens - c_.sink_tokens - row_.quantized);
  }

  // `count` exact tokens that lie one after the other, the first of them token `token` of the row.
  void attend_rows(const uint8_t* key, int64_t key_step, const uint8_t* value, int64_t value_step,
                   int64_t token, int64_t count) {
    const int64_t item = size_of(c_.type);
    for (int64_t done = 0; done < count; done += kTileTokens) {
      const int n = static_cast<int>(std::min<int64_t>(kTileTokens, count - done));
      const int64_t position = row_.start + token + done;
      if (!visible(position, n)) continue;
      attend_chunk(key + done * key_step * item, key_step, value + done * value_step * item,
                   value_step, position, n);
    }
  }

  void attend_chunk(const uint8_t* key, int64_t key_step, const uint8_t* value, int64_t value_step,
                    int64_t position, int count) {
    const ExactAttentionKernels& k = *kernels_.exact;
    const int64_t item = size_of(c_.type);
    k.score_exact(key, c_.type, key_step, count, f_.key_dim, s_.query.data(), rows_, value,
                  value_step * item, static_cast<int>(f_.value_dim * item), s_.logits);
    for (int r = 0; r < rows_; ++r) mask_row(r, position, count, s_.logits + r * kTileTokens);
    kernels_.softmax->softmax(s_.logits, s_.softmax, s_.acc.data(), f_.value_dim, rows_, s_.p);
    int zeros = 0;
    for (int r = 0; r < rows_; ++r)
      for (int t = 0; t < count; ++t) zeros += s_.p[r * kTileTokens + t] == 0.0f;
    k.accumulate_exact(value, c_.type, value_step, count, f_.value_dim, s_.p, rows_, zeros > 0,
                       s_.acc.data());
  }

  bool visible(int64_t position, int count) const {
    return position < s_.end[rows_ - 1] && position + count > s_.begin[0];
  }

  // Softcap, masks and the end of the tile; masked logits become -inf whatever they held.
  void mask_row(int r, int64_t position, int count, float* logits) const {
    if (c_.softcap > 0.0f) {
      const float cap = c_.softcap * kLog2E;
      for (int t = 0; t < count; ++t) logits[t] = cap * std::tanh(logits[t] / cap);
    }
    if (c_.mask_type != MaskType::kNone) add_mask(r, position, count, logits);
    const int64_t begin = s_.begin[r] - position, end = s_.end[r] - position;
    for (int64_t t = 0; t < std::min<int64_t>(begin, count); ++t) logits[t] = kNegativeInfinity;
    for (int64_t t = std::max<int64_t>(std::min<int64_t>(end, count), 0); t < kTileTokens; ++t)
      logits[t] = kNegativeInfinity;
  }

  void add_mask(int r, int64_t position, int count, float* logits) const {
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

  const Kernels& kernels_;
  const Plan& plan_;
  const AttentionCall& c_;
  const Layout& f_;
  Scratch& s_;
  Row row_;
  int64_t batch_, head_, first_;
  int rows_;
};

}  // namespace

void check_lengths(const int32_t* lengths, const int32_t* block_table, int64_t batch,
                   int64_t max_pages, int64_t pages, int64_t capacity, int64_t sink_tokens) {
  for (int64_t b = 0; b < batch; ++b) {
    const Row r = read_row(lengths, b);
    if (r.start < 0 || r.length < 0 || r.quantized < 0 ||
        r.quantized > std::max<int64_t>(r.tokens - sink_tokens, 0) ||
        r.tokens - r.quantized > capacity || r.tiles > max_pages)
      throw std::out_of_range("lengths[" + std::to_string(b) + "] = (start " +
                              std::to_string(r.start) + ", length " + std::to_string(r.length) +
                              ", quantized " + std::to_string(r.quantized) + ") does not fit " +
                              std::to_string(max_pages) + " pages, " + std::to_string(capacity) +
                              " exact tokens and sink_tokens=" + std::to_string(sink_tokens));
    for (int64_t n = 0; n < r.tiles; ++n) {
      const int64_t page = block_table[b * max_pages + n];
      if (page < 0 || page >= pages)
        throw std::out_of_range("block_table[" + std::to_string(b) + ", " + std::to_string(n) +
                                "] must be in [0, " + std::to_string(pages) + "), got " +
                                std::to_string(page));
    }
  }
}

void attention(const Kernels& kernels, const AttentionCall& call, const ParallelFor& parallel_for) {
  const Plan plan(call);
  const int64_t block_floats = std::min<int64_t>(kMaxRows, plan.rows) * plan.partial_stride;
  const int64_t floats = plan.items() * plan.parts * block_floats;
  // A step's results stay in memory that was used before; those of a long call are given back.
  static thread_local float kept[kKeptFloats];
  const std::unique_ptr<float[]> large(floats > kKeptFloats ? new float[floats] : nullptr);
  float* partial = large ? large.get() : kept;
  parallel_for(plan.items() * plan.parts, [&](int64_t begin, int64_t end) {
    for (int64_t u = begin; u < end; ++u)
      Unit(kernels, plan, u / plan.parts).run(u % plan.parts, partial + u * block_floats);
  });
  parallel_for(plan.items(), [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t block = item % plan.blocks, head = item / plan.blocks % call.kv_heads;
      const int64_t batch = item / plan.blocks / call.kv_heads;
      const int64_t last = std::min<int64_t>(kMaxRows, plan.rows - block * kMaxRows);
      for (int64_t r = 0; r < last; ++r) {
        const int64_t row = block * kMaxRows + r;
        merge_row(kernels, plan,
                  partial + item * plan.parts * block_floats + r * plan.partial_stride,
                  block_floats, batch, head * plan.group + row % plan.group, row / plan.group);
      }
    }
  });
}

}  // namespace kvq
