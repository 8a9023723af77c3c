#include <torch/csrc/stable/library.h>

#include <optional>
#include <string_view>
#include <tuple>

#include "csrc/checks.h"
#include "csrc/query.h"
#include "csrc/tensors.h"
#include "ops_cpu/attention.h"

namespace kvq {
namespace {

std::tuple<Tensor, Tensor> lut_attention(
    const Tensor& query, const Tensor& tiles, const Tensor& block_table, const Tensor& balance,
    const Tensor& exact_key, const Tensor& exact_value, const Tensor& lengths,
    std::optional<Tensor> attn_mask, int64_t key_bits, int64_t value_bits, int64_t sink_tokens,
    std::optional<double> scale, bool is_causal, std::optional<int64_t> sliding_window,
    std::optional<double> softcap, std::optional<Tensor> sinks, std::string_view precision) {
  const QueryArguments arguments{query,          attn_mask, scale, is_causal,
                                 sliding_window, softcap,   sinks, precision};
  AttentionCall c{};
  c.layout = check_state({tiles, block_table, balance, exact_key, exact_value, lengths}, key_bits,
                         value_bits, sink_tokens);
  c.type = float_type("exact_key", exact_key);
  c.batch = exact_key.size(0);
  c.kv_heads = exact_key.size(1);
  c.sink_tokens = sink_tokens;
  check_query(c, arguments);

  const Tensor records = with_contiguous_rows(tiles);
  const Tensor k = with_contiguous_rows(exact_key), v = with_contiguous_rows(exact_value);
  const Tensor table = contiguous(block_table);
  const Tensor factors = contiguous(balance);
  const Tensor rows = contiguous(lengths);
  c.max_pages = table.size(1);
  c.lengths = rows.const_data_ptr<int32_t>();
  c.block_table = table.const_data_ptr<int32_t>();
  check_lengths(c.lengths, c.block_table, c.batch, c.max_pages, tiles.size(0), exact_key.size(2),
                sink_tokens);
  const QueryTensors held = read_query(c, arguments);
  c.tiles = records.const_data_ptr<uint8_t>();
  read_strides(records, c.tiles_stride);
  c.balance = factors.const_data_ptr<float>();
  c.exact_key = k.const_data_ptr();
  read_strides(k, c.exact_key_stride);
  c.exact_value = v.const_data_ptr();
  read_strides(v, c.exact_value_stride);

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
