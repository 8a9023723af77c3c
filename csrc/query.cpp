#include "csrc/query.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "csrc/checks.h"
#include "csrc/tensors.h"

namespace kvq {
namespace {

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

}  // namespace

void check_query(AttentionCall& c, const QueryArguments& a) {
  check_rank("query", a.query, 4);
  c.query_type = float_type("query", a.query);
  c.heads = a.query.size(1);
  c.queries = a.query.size(2);
  check_size("query", a.query, 0, c.batch, "batch");
  check_size("query", a.query, 3, c.layout.key_dim, "key dim");
  if (c.kv_heads == 0 || c.heads % c.kv_heads)
    value_error("query heads must be a multiple of " + std::to_string(c.kv_heads) +
                " kv heads, got " + std::to_string(c.heads));
  if (a.sliding_window && *a.sliding_window < 1)
    value_error("sliding_window must be at least 1, got " + std::to_string(*a.sliding_window));
  if (a.softcap && !(*a.softcap > 0))
    value_error("softcap must be positive, got " + std::to_string(*a.softcap));
  if (a.precision != "exact" && a.precision != "fast")
    value_error("precision must be 'exact' or 'fast', got '" + std::string(a.precision) + "'");
}

QueryTensors read_query(AttentionCall& c, const QueryArguments& a) {
  int64_t positions = 0;
  for (int64_t b = 0; b < c.batch; ++b)
    positions = std::max<int64_t>(positions, c.lengths[b * kLengthColumns + kLength]);

  QueryTensors tensors{with_contiguous_rows(a.query), std::nullopt, std::nullopt};
  if (a.attn_mask) {
    c.mask_type = check_mask(*a.attn_mask, c.batch, c.heads, c.queries, positions);
    tensors.mask = with_contiguous_rows(*a.attn_mask);
    c.mask = tensors.mask->const_data_ptr();
    read_strides(*tensors.mask, c.mask_stride);
  }
  if (a.sinks) {
    check_rank("sinks", *a.sinks, 1);
    c.sinks_type = float_type("sinks", *a.sinks);
    check_size("sinks", *a.sinks, 0, c.heads, "query heads");
    tensors.sinks = contiguous(*a.sinks);
    c.sinks = tensors.sinks->const_data_ptr();
  }
  c.query = tensors.query.const_data_ptr();
  read_strides(tensors.query, c.query_stride);
  c.scale = static_cast<float>(a.scale ? *a.scale : 1.0 / std::sqrt(double(c.layout.key_dim)));
  c.is_causal = a.is_causal;
  c.sliding_window = a.sliding_window.value_or(0);
  c.softcap = static_cast<float>(a.softcap.value_or(0));
  c.exact = a.precision == "exact";
  return tensors;
}

}  // namespace kvq
