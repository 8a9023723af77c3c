#include "ops_cpu/tiered_attention.h"

#include <torch/csrc/stable/library.h>

#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>

#include "csrc/checks.h"
#include "csrc/query.h"
#include "csrc/tensors.h"

namespace kvq {
namespace {

struct TierTensors {
  const Tensor &near_key, &near_value, &near_index, &near_count;
  const Tensor &tiles, &block_table, &promoted, &lengths;
  const std::optional<Tensor>& balance;
};

void check_near_tensors(const TierTensors& s) {
  check_rank("near_key", s.near_key, 4);
  check_rank("near_value", s.near_value, 4);
  float_type("near_key", s.near_key);
  check_dtype("near_value", s.near_value, s.near_key.scalar_type());
  check_size("near_value", s.near_value, 0, s.near_key.size(0), "near_key.shape[0]");
  check_size("near_value", s.near_value, 1, s.near_key.size(1), "near_key.shape[1]");
  check_size("near_value", s.near_value, 2, s.near_key.size(2), "near_key.shape[2]");
  check_head_dim("key_dim", s.near_key.size(3));
  check_head_dim("value_dim", s.near_value.size(3));
  check_rank("near_index", s.near_index, 3);
  check_rank("near_count", s.near_count, 2);
  check_dtype("near_index", s.near_index, ScalarType::Int);
  check_dtype("near_count", s.near_count, ScalarType::Int);
  const int64_t batch = s.near_key.size(0), kv_heads = s.near_key.size(1);
  check_size("near_index", s.near_index, 0, batch, "batch");
  check_size("near_index", s.near_index, 1, kv_heads, "kv heads");
  check_size("near_index", s.near_index, 2, s.near_key.size(2), "near_key.shape[2]");
  check_size("near_count", s.near_count, 0, batch, "batch");
  check_size("near_count", s.near_count, 1, kv_heads, "kv heads");
}

void check_far_tensors(const TierTensors& s, int64_t record_bytes) {
  const int64_t batch = s.near_key.size(0), kv_heads = s.near_key.size(1);
  check_rank("tiles", s.tiles, 3);
  check_rank("block_table", s.block_table, 2);
  check_rank("promoted", s.promoted, 3);
  check_rank("lengths", s.lengths, 2);
  check_dtype("tiles", s.tiles, ScalarType::Byte);
  check_dtype("block_table", s.block_table, ScalarType::Int);
  check_dtype("promoted", s.promoted, ScalarType::Long);
  check_dtype("lengths", s.lengths, ScalarType::Int);
  check_size("tiles", s.tiles, 1, kv_heads, "kv heads");
  check_size("tiles", s.tiles, 2, record_bytes, "record_bytes");
  check_size("block_table", s.block_table, 0, batch, "batch");
  check_size("promoted", s.promoted, 0, batch, "batch");
  check_size("promoted", s.promoted, 1, kv_heads, "kv heads");
  check_size("promoted", s.promoted, 2, s.block_table.size(1), "max_pages");
  check_size("lengths", s.lengths, 0, batch, "batch");
  check_size("lengths", s.lengths, 1, kLengthColumns, "start, length, quantized");
}

void check_tier_balance(const TierTensors& s, std::string_view far) {
  if (s.balance.has_value() != (far == "tile4"))
    value_error("balance belongs to far='tile4' and to no other, got " +
                (s.balance ? "shape " + shape_text(*s.balance) : std::string("none")) + " with '" +
                std::string(far) + "'");
  if (!s.balance) return;
  check_rank("balance", *s.balance, 3);
  check_dtype("balance", *s.balance, ScalarType::Float);
  check_size("balance", *s.balance, 0, s.near_key.size(0), "batch");
  check_size("balance", *s.balance, 1, s.near_key.size(1), "kv heads");
  check_size("balance", *s.balance, 2, s.near_key.size(3), "key dim");
}

// Sizes and layouts of the call, when the tensors fit each other.
TieredCall check_tiers(const TierTensors& s, std::string_view far, int64_t sink_tokens,
                       int64_t candidates) {
  check_near_tensors(s);
  if (far != "fp8-int4" && far != "tile4")
    value_error("far must be 'fp8-int4' or 'tile4', got '" + std::string(far) + "'");
  TieredCall c{};
  const auto key_dim = static_cast<int>(s.near_key.size(3));
  const auto value_dim = static_cast<int>(s.near_value.size(3));
  c.fp8 = far == "fp8-int4";
  c.far = make_far_layout(key_dim, value_dim);
  c.layout = make_layout(key_dim, value_dim, 4, 4, 0);
  check_far_tensors(s, c.fp8 ? c.far.record_bytes : c.layout.record_bytes);
  check_tier_balance(s, far);
  check_not_negative("sink_tokens", sink_tokens);
  if (candidates < 0 || candidates > kMaxCandidates)
    value_error("candidates must be from 0 to " + std::to_string(kMaxCandidates) + ", got " +
                std::to_string(candidates));
  c.type = float_type("near_key", s.near_key);
  c.batch = s.near_key.size(0);
  c.kv_heads = s.near_key.size(1);
  c.capacity = s.near_key.size(2);
  c.max_pages = s.block_table.size(1);
  c.sink_tokens = sink_tokens;
  c.candidates = candidates;
  return c;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> tiered_attention_op(
    const Tensor& query, const Tensor& near_key, const Tensor& near_value, const Tensor& near_index,
    const Tensor& near_count, const Tensor& tiles, const Tensor& block_table,
    const Tensor& promoted, const Tensor& lengths, std::optional<Tensor> attn_mask,
    std::optional<Tensor> balance, std::string_view far, int64_t sink_tokens, int64_t candidates,
    std::optional<double> scale, bool is_causal, std::optional<int64_t> sliding_window,
    std::optional<double> softcap, std::optional<Tensor> sinks, std::string_view precision) {
  const QueryArguments arguments{query,          attn_mask, scale, is_causal,
                                 sliding_window, softcap,   sinks, precision};
  TieredCall c = check_tiers({near_key, near_value, near_index, near_count, tiles, block_table,
                              promoted, lengths, balance},
                             far, sink_tokens, candidates);
  check_query(c, arguments);

  const Tensor records = with_contiguous_rows(tiles);
  const Tensor k = with_contiguous_rows(near_key), v = with_contiguous_rows(near_value);
  const Tensor index = contiguous(near_index), count = contiguous(near_count);
  const Tensor table = contiguous(block_table), masks = contiguous(promoted);
  const Tensor rows = contiguous(lengths);
  c.lengths = rows.const_data_ptr<int32_t>();
  c.block_table = table.const_data_ptr<int32_t>();
  c.near_index = index.const_data_ptr<int32_t>();
  c.near_count = count.const_data_ptr<int32_t>();
  c.promoted = masks.const_data_ptr<int64_t>();
  check_lengths(c.lengths, c.block_table, c.batch, c.max_pages, tiles.size(0),
                std::numeric_limits<int64_t>::max(), sink_tokens);
  check_near(c);
  const QueryTensors held = read_query(c, arguments);
  std::optional<Tensor> factors;
  if (balance) {
    factors = contiguous(*balance);
    c.balance = factors->const_data_ptr<float>();
  }
  c.tiles = records.const_data_ptr<uint8_t>();
  read_strides(records, c.tiles_stride);
  c.exact_key = k.const_data_ptr();
  read_strides(k, c.exact_key_stride);
  c.exact_value = v.const_data_ptr();
  read_strides(v, c.exact_value_stride);

  Tensor out = empty({c.batch, c.heads, c.queries, c.layout.value_dim}, query.scalar_type());
  Tensor lse = empty({c.batch, c.heads, c.queries}, ScalarType::Float);
  Tensor best_index = empty({c.batch, c.kv_heads, candidates}, ScalarType::Int);
  Tensor best_score = empty({c.batch, c.kv_heads, candidates}, ScalarType::Float);
  Tensor near_score = empty({c.batch, c.kv_heads, candidates ? c.capacity : 0}, ScalarType::Float);
  Tensor skipped = empty({c.batch, c.kv_heads}, ScalarType::Int);
  c.out = out.mutable_data_ptr();
  c.lse = lse.mutable_data_ptr<float>();
  c.candidate_index = best_index.mutable_data_ptr<int32_t>();
  c.candidate_score = best_score.mutable_data_ptr<float>();
  c.near_score = near_score.mutable_data_ptr<float>();
  c.skipped = skipped.mutable_data_ptr<int32_t>();
  tiered_attention(active(), c, run_parallel);
  return {out, lse, best_index, best_score, near_score, skipped};
}

}  // namespace
}  // namespace kvq

STABLE_TORCH_LIBRARY_IMPL(kvq, CPU, m) {
  m.impl("tiered_attention", TORCH_BOX(&kvq::tiered_attention_op));
}
