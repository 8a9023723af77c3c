#include "ops_cpu/append.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "ops_cpu/tile.h"

namespace kvq {
namespace {

// What an append does to one row.
struct RowPlan {
  int64_t before;         // attended tokens before
  int64_t after;          // and after
  int64_t first_new;      // first of the new positions that is not padding
  int64_t quantized;      // tokens in tiles before
  int64_t new_quantized;  // and after
  int balance_tokens;     // keys that the balance is taken from
};

RowPlan plan_row(const LayerState& s, int64_t row, int64_t tokens, const AppendRule& rule) {
  const int32_t* l = s.lengths + row * kLengthColumns;
  RowPlan p;
  p.before = std::max<int64_t>(l[kLength] - l[kStart], 0);
  p.after = std::max<int64_t>(l[kLength] + tokens - l[kStart], 0);
  p.first_new = tokens - (p.after - p.before);
  p.quantized = l[kQuantized];
  p.new_quantized = quantized_tokens(p.after, p.quantized, s.sink_tokens, rule.residual_length,
                                     rule.quantized_start);
  p.balance_tokens = static_cast<int>(balance_tokens(s.sink_tokens, rule.quantized_start));
  return p;
}

// One row and KV head during an append: where its tokens are.
class HeadAppend {
 public:
  HeadAppend(const Kernels& kernels, const LayerState& state, const RowPlan& plan, int64_t row,
             int64_t head, const NewTokens& key, const NewTokens& value)
      : kernels_(kernels), s_(state), p_(plan), row_(row), head_(head) {
    item_ = size_of(s_.type);
    const int64_t exact = (row * s_.kv_heads + head) * s_.capacity * item_;
    exact_key_ = static_cast<uint8_t*>(s_.exact_key) + exact * s_.layout.key_dim;
    exact_value_ = static_cast<uint8_t*>(s_.exact_value) + exact * s_.layout.value_dim;
    new_key_ = new_base(key, key_step_);
    new_value_ = new_base(value, value_step_);
    balance_ = s_.balance + (row * s_.kv_heads + head) * s_.layout.key_dim;
  }

  void run() {
    if (p_.new_quantized > p_.quantized) {
      if (p_.quantized == 0 && !s_.layout.pass_through()) fix_balance();
      write_tiles();
    }
    close_gap();
    copy_new();
  }

 private:
  const uint8_t* new_base(const NewTokens& n, int64_t& step) const {
    step = n.stride[2] * item_;
    return static_cast<const uint8_t*>(n.data) +
           (row_ * n.stride[0] + head_ * n.stride[1] + p_.first_new * n.stride[2]) * item_;
  }

  // Token t of the row, still in its exact slot or among the new ones.
  const void* key_at(int64_t t) const {
    if (t >= p_.before) return new_key_ + (t - p_.before) * key_step_;
    return exact_key_ + slot(t) * s_.layout.key_dim * item_;
  }
  const void* value_at(int64_t t) const {
    if (t >= p_.before) return new_value_ + (t - p_.before) * value_step_;
    return exact_value_ + slot(t) * s_.layout.value_dim * item_;
  }
  int64_t slot(int64_t t) const { return t < s_.sink_tokens ? t : t - p_.quantized; }

  void fix_balance() {
    const int dim = s_.layout.key_dim;
    const int count = p_.balance_tokens;
    std::vector<float> rows(static_cast<size_t>(kBalanceFold) * dim);
    for (int i = 0; i < count; ++i)
      kernels_.transform->load_bounded(key_at(s_.sink_tokens + i), s_.type, &rows[i * dim], dim);
    key_balance(rows.data(), count, dim, balance_);
  }

  void write_tiles() {
    TileBuffer buffer(s_.layout);
    for (int64_t q = p_.quantized; q < p_.new_quantized;) {
      const int first = static_cast<int>(q % kTileTokens);
      const int64_t tile = q / kTileTokens, token = s_.sink_tokens + tile * kTileTokens;
      const int64_t page = s_.block_table[row_ * s_.max_pages + tile];
      uint8_t* record = s_.tiles + (page * s_.kv_heads + head_) * s_.layout.record_bytes;
      if (s_.layout.pass_through()) {
        write_raw(token, first, record);
      } else {
        load_tile(token, first, buffer);
        encode_tile(kernels_, s_.layout, balance_, first, buffer, record);
      }
      q += kTileTokens - first;
    }
  }

  void load_tile(int64_t token, int first, TileBuffer& b) const {
    const Layout& f = s_.layout;
    for (int i = first; i < kTileTokens; ++i) {
      const TransformKernels& k = *kernels_.transform;
      k.load_bounded(key_at(token + i), s_.type, &b.key[i * f.key_dim], f.key_dim);
      k.load_bounded(value_at(token + i), s_.type, &b.value[i * f.value_dim], f.value_dim);
    }
  }

  void write_raw(int64_t token, int first, uint8_t* record) const {
    const Layout& f = s_.layout;
    const int64_t key_bytes = f.key_dim * item_, value_bytes = f.value_dim * item_;
    for (int i = first; i < kTileTokens; ++i) {
      std::memcpy(record + f.key_code + i * key_bytes, key_at(token + i), key_bytes);
      std::memcpy(record + f.value_code + i * value_bytes, value_at(token + i), value_bytes);
    }
  }

  // The window slides down over the slots of the tokens that became tiles.
  void close_gap() {
    const int64_t moved = p_.new_quantized - p_.quantized;
    const int64_t first = s_.sink_tokens + p_.new_quantized, kept = p_.before - first;
    if (moved == 0 || kept <= 0) return;
    const int64_t to = s_.sink_tokens, from = to + moved;
    for (auto [base, dim] : {std::pair<uint8_t*, int>{exact_key_, s_.layout.key_dim},
                             {exact_value_, s_.layout.value_dim}})
      std::memmove(base + to * dim * item_, base + from * dim * item_, kept * dim * item_);
  }

  void copy_new() {
    const Layout& f = s_.layout;
    for (int64_t t = p_.before; t < p_.after; ++t) {
      if (t >= s_.sink_tokens && t < s_.sink_tokens + p_.new_quantized) continue;
      const int64_t to = t < s_.sink_tokens ? t : t - p_.new_quantized, i = t - p_.before;
      std::memcpy(exact_key_ + to * f.key_dim * item_, new_key_ + i * key_step_, f.key_dim * item_);
      std::memcpy(exact_value_ + to * f.value_dim * item_, new_value_ + i * value_step_,
                  f.value_dim * item_);
    }
  }

  const Kernels& kernels_;
  const LayerState& s_;
  const RowPlan& p_;
  int64_t row_, head_, item_, key_step_ = 0, value_step_ = 0;
  uint8_t *exact_key_, *exact_value_;
  const uint8_t *new_key_, *new_value_;
  float* balance_;
};

[[noreturn]] void no_room(const char* what, int64_t row, int64_t needed, int64_t there) {
  throw std::out_of_range(std::string(what) + ": row " + std::to_string(row) + " needs " +
                          std::to_string(needed) + ", got " + std::to_string(there));
}

}  // namespace

void check_append(const LayerState& s, int64_t tokens, const AppendRule& rule) {
  for (int64_t row = 0; row < s.batch; ++row) {
    const RowPlan p = plan_row(s, row, tokens, rule);
    const int64_t pages = (p.new_quantized + kTileTokens - 1) / kTileTokens;
    if (pages > s.max_pages) no_room("block_table is too short", row, pages, s.max_pages);
    if (p.after - p.new_quantized > s.capacity)
      no_room("exact_key has too few slots", row, p.after - p.new_quantized, s.capacity);
    for (int64_t n = p.quantized / kTileTokens; n < pages; ++n) {
      const int64_t page = s.block_table[row * s.max_pages + n];
      if (page < 0 || page >= s.pages)
        throw std::out_of_range("block_table[" + std::to_string(row) + ", " + std::to_string(n) +
                                "] must be in [0, " + std::to_string(s.pages) + "), got " +
                                std::to_string(page));
    }
  }
}

void append(const Kernels& kernels, const LayerState& s, const NewTokens& key,
            const NewTokens& value, int64_t tokens, const AppendRule& rule,
            const ParallelFor& parallel_for) {
  std::vector<RowPlan> plans;
  for (int64_t row = 0; row < s.batch; ++row) plans.push_back(plan_row(s, row, tokens, rule));
  parallel_for(s.batch * s.kv_heads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i / s.kv_heads, head = i % s.kv_heads;
      HeadAppend(kernels, s, plans[row], row, head, key, value).run();
    }
  });
  for (int64_t row = 0; row < s.batch; ++row) {
    int32_t* l = s.lengths + row * kLengthColumns;
    l[kLength] += static_cast<int32_t>(tokens);
    l[kQuantized] = static_cast<int32_t>(plans[row].new_quantized);
  }
}

}  // namespace kvq
