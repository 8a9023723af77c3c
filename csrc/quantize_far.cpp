#include <torch/csrc/stable/library.h>

#include <tuple>

#include "csrc/checks.h"
#include "csrc/tensors.h"
#include "ops_cpu/far.h"

namespace kvq {
namespace {

// Row `token` of a head of a tile, [tiles, kv_heads, 64, dim].
const uint8_t* row_of(const Tensor& t, Float type, int64_t tile, int64_t head, int64_t token) {
  return static_cast<const uint8_t*>(t.const_data_ptr()) +
         (tile * t.stride(0) + head * t.stride(1) + token * t.stride(2)) * size_of(type);
}

Tensor quantize_far(const Tensor& key, const Tensor& value) {
  const Float type = check_new_tokens(key, value);
  check_size("key", key, 2, kTileTokens, "tokens of a tile");
  const FarLayout f =
      make_far_layout(static_cast<int>(key.size(3)), static_cast<int>(value.size(3)));
  const Tensor k = with_contiguous_rows(key), v = with_contiguous_rows(value);
  const int64_t tiles = key.size(0), heads = key.size(1);
  Tensor out = empty({tiles, heads, f.record_bytes}, ScalarType::Byte);
  auto* to = out.mutable_data_ptr<uint8_t>();
  const Kernels& kernels = active();
  run_parallel(tiles * heads, [&](int64_t begin, int64_t end) {
    FarBuffer buffer(f);
    for (int64_t i = begin; i < end; ++i) {
      const auto load = kernels.transform->load_bounded;
      for (int t = 0; t < kTileTokens; ++t) {
        load(row_of(k, type, i / heads, i % heads, t), type, &buffer.key[t * f.key_dim], f.key_dim);
        load(row_of(v, type, i / heads, i % heads, t), type, &buffer.value[t * f.value_dim],
             f.value_dim);
      }
      encode_far(kernels, f, buffer, to + i * f.record_bytes);
    }
  });
  return out;
}

std::tuple<Tensor, Tensor> dequantize_far(const Tensor& tiles, int64_t key_dim, int64_t value_dim,
                                          ScalarType dtype) {
  check_rank("tiles", tiles, 3);
  check_dtype("tiles", tiles, ScalarType::Byte);
  const Float type = float_type("dtype", dtype);
  check_head_dim("key_dim", key_dim);
  check_head_dim("value_dim", value_dim);
  const FarLayout f = make_far_layout(static_cast<int>(key_dim), static_cast<int>(value_dim));
  check_size("tiles", tiles, 2, f.record_bytes, "record_bytes");
  const int64_t count = tiles.size(0), heads = tiles.size(1);
  Tensor key = empty({count, heads, kTileTokens, key_dim}, dtype);
  Tensor value = empty({count, heads, kTileTokens, value_dim}, dtype);
  const Tensor records = contiguous(tiles);
  const auto* from = records.const_data_ptr<uint8_t>();
  auto* key_to = static_cast<uint8_t*>(key.mutable_data_ptr());
  auto* value_to = static_cast<uint8_t*>(value.mutable_data_ptr());
  const int64_t key_count = kTileTokens * key_dim, value_count = kTileTokens * value_dim;
  const Kernels& kernels = active();
  run_parallel(count * heads, [&](int64_t begin, int64_t end) {
    FarBuffer buffer(f);
    for (int64_t i = begin; i < end; ++i) {
      decode_far(f, from + i * f.record_bytes, buffer);
      kernels.transform->store(buffer.key.data(), key_to + i * key_count * size_of(type), type,
                               key_count);
      kernels.transform->store(buffer.value.data(), value_to + i * value_count * size_of(type),
                               type, value_count);
    }
  });
  return {key, value};
}

}  // namespace
}  // namespace kvq

STABLE_TORCH_LIBRARY_IMPL(kvq, CPU, m) {
  m.impl("quantize_far", TORCH_BOX(&kvq::quantize_far));
  m.impl("dequantize_far", TORCH_BOX(&kvq::dequantize_far));
}
