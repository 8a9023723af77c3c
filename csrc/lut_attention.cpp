#include "ops_cpu/attention.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>

#include "csrc/checks.h"
#include "csrc/tensors.h"

namespace kvq {
namespace {

// Strides of all but the last dimension, 0 where the size is 1 so that the tensor broadcasts.
template <size_t N>
void read_strides(const Tensor& tensor, int64_t (&out)[N]) {
  for (size_t i = 0; i < N; ++i) out[i] = tensor.size(i) == 1 ? 0 : tensor.stride(i);
}

MaskType check_mask(const Tensor& mask, int64_t batch, int64_t heads, int64_t queries,
                    int64_t positions) {
  check_rank("attn_mask", mask, 4);
  MaskType type = MaskType::kBool;
  if (mask.scalar_type() != ScalarType::Bool) {
    const Float f = float_type("attn_mask", mask);
    type = f == Float::kFloat32   ? MaskType::kFloat32
           : f == Float::kFloat16 ? MaskType::kFloat16
                                  : MaskType::kBFloat16;
  }
  const int64_t sizes[3] = {batch, heads, queries};
  for (int64_t d = 0; d < 3; ++d)
    if (mask.size(d) != 1 && mask.size(d) != sizes[d])
      value_error("attn_mask.shape[" + std::to_string(d) + "] must be 1 or " +
                  std::to_string(sizes[d]) + ", got shape " + shape_text(mask));
  if (mask.size(3) < positions)
    value_error("attn_mask.shape[3] must be at least " + std::to_string(positions) +
                " (positions), got shape " + shape_text(mask));
  return type;
}

std::tuple<Tensor, Tensor> lut_attention(
    const Tensor& query, const Tensor& tiles, const Tensor& block_table, const Tensor& balance,
    const Tensor& exact_key, const Tensor& exact_value, const Tensor& lengths,
    std::optional<Tensor> attn_mask, int64_t key_bits, int64_t value_bits, int64_t sink_tokens,
    std::optional<double> scale, bool is_causal, std::optional<int64_t> sliding_window,
    std::optional<double> softcap, std::optional<Tensor> sinks, std::string_view precision) {
  AttentionCall c{};
  c.layout = check_state({tiles, block_table, balance, exact_key, exact_value, lengths}, key_bits,
                         value_bits, sink_tokens);
  check_rank("query", query, 4);
  c.query_type = float_type("query", query);
  c.type = float_type("exact_key", exact_key);
  c.batch = exact_key.size(0);
  c.kv_heads = exact_key.size(1);
  c.heads = query.size(1);
  c.queries = query.size(2);
  c.sink_tokens = sink_tokens;
  check_size("query", query, 0, c.batch, "batch");
  check_size("query", query, 3, exact_key.size(3), "key dim");
  if (c.kv_heads == 0 || c.heads % c.kv_heads)
    value_error("query heads must be a multiple of " + std::to_string(c.kv_heads) +
                " kv heads, got " + std::to_string(c.heads));
  if (sliding_window && *sliding_window < 1)
    value_error("sliding_window must be at least 1, got " + std::to_string(*sliding_window));
  if (softcap && !(*softcap > 0))
    value_error("softcap must be positive, got " + std::to_string(*softcap));
  if (precision != "exact" && precision != "fast")
    value_error("precision must be 'exact' or 'fast', got '" + std::string(precision) + "'");

  const Tensor q = with_contiguous_rows(query), records = with_contiguous_rows(tiles);
  const Tensor k = with_contiguous_rows(exact_key), v = with_contiguous_rows(exact_value);
  const Tensor table = contiguous(block_table);
  const Tensor factors = contiguous(balance);
  const Tensor rows = contiguous(lengths);
  c.max_pages = table.size(1);
  c.lengths = rows.const_data_ptr<int32_t>();
  c.block_table = table.const_data_ptr<int32_t>();
  check_lengths(c.lengths, c.block_table, c.batch, c.max_pages, tiles.size(0), exact_key.size(2),
                sink_tokens);
  int64_t positions = 0;
  for (int64_t b = 0; b < c.batch; ++b)
    positions = std::max<int64_t>(positions, c.lengths[b * kLengthColumns + kLength]);

  std::optional<Tensor> mask, sink;
  if (attn_mask) {
    c.mask_type = check_mask(*attn_mask, c.batch, c.heads, c.queries, positions);
    mask = with_contiguous_rows(*attn_mask);
    c.mask = mask->const_data_ptr();
    read_strides(*mask, c.mask_stride);
  }
  if (sinks) {
    check_rank("sinks", *sinks, 1);
    c.sinks_type = float_type("sinks", *sinks);
    check_size("sinks", *sinks, 0, c.heads, "query heads");
    sink = contiguous(*sinks);
    c.sinks = sink->const_data_ptr();
  }

  c.query = q.const_data_ptr();
  read_strides(q, c.query_stride);
  c.tiles = records.const_data_ptr<uint8_t>();
  read_strides(records, c.tiles_stride);
  c.balance = factors.const_data_ptr<float>();
  c.exact_key = k.const_data_ptr();
  read_strides(k, c.exact_key_stride);
  c.exact_value = v.const_data_ptr();
  read_strides(v, c.exact_value_stride);
  c.scale = static_cast<float>(scale ? *scale : 1.0 / std::sqrt(double(c.layout.key_dim)));
  c.is_causal = is_causal;
  c.sliding_window = sliding_window.value_or(0);
  c.softcap = static_cast<float>(softcap.value_or(0));
  c.exact = precision == "exact";

  Tensor out = empty({c.batch, c.heads, c.queries, c.layout.value_dim}, query.scalar_type());
  Tensor lse = empty({c.batch, c.heads, c.queries}, ScalarType::Float);
  c.out = out.mutable_data_ptr();
  c.lse = lse.mutable_data_ptr<float>();
  attention(active(), c, run_parallel);
  return {out, lse};
}

}  // namespace
}  // namespace kvq

STABLE_TORCH_LIBRARY_IMPL(kvq, CPU, m) { m.impl("lut_attention", TORCH_BOX(&kvq::lut_attention)); }
