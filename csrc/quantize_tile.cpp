#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <tuple>
#include <vector>

#include "csrc/checks.h"
#include "csrc/tensors.h"
#include "ops_cpu/append.h"
#include "ops_cpu/attention.h"
#include "ops_cpu/tile.h"

namespace kvq {
namespace {

const uint8_t* at(const NewTokens& n, Float type, int64_t row, int64_t head, int64_t token) {
  return static_cast<const uint8_t*>(n.data) +
         (row * n.stride[0] + head * n.stride[1] + token * n.stride[2]) * size_of(type);
}

Tensor key_balance_op(const Tensor& key) {
  check_rank("key", key, 4);
  const Float type = float_type("key", key);
  check_head_dim("key.shape[-1]", key.size(3));
  if (key.size(2) < 1)
    value_error("key must hold at least one token, got shape " + shape_text(key));
  const Tensor rows = with_contiguous_rows(key);
  const NewTokens n = new_tokens(rows);
  const int64_t heads = key.size(1);
  const int dim = static_cast<int>(key.size(3));
  const int count = static_cast<int>(std::min<int64_t>(key.size(2), kBalanceTokens));
  Tensor out = empty({key.size(0), heads, dim}, ScalarType::Float);
  float* to = out.mutable_data_ptr<float>();
  const TransformKernels& k = *active().transform;
  run_parallel(key.size(0) * heads, [&](int64_t begin, int64_t end) {
    std::vector<float> buffer(static_cast<size_t>(kBalanceFold) * dim);
    for (int64_t i = begin; i < end; ++i) {
      for (int t = 0; t < count; ++t)
        k.load_bounded(at(n, type, i / heads, i % heads, t), type, &buffer[t * dim], dim);
      key_balance(buffer.data(), count, dim, to + i * dim);
    }
  });
  return out;
}

// A tile of 64 contiguous raw rows, or of decoded ones, on its way from and to tensors.
Tensor quantize_tile(const Tensor& key, const Tensor& value, const Tensor& balance,
                     int64_t key_bits, int64_t value_bits) {
  const Float type = check_new_tokens(key, value);
  check_size("key", key, 2, kTileTokens, "tokens of a tile");
  check_tile_balance(balance, key.size(0), key.size(1), key.size(3));
  check_bits(key_bits, value_bits);
  const Layout f =
      make_layout(static_cast<int>(key.size(3)), static_cast<int>(value.size(3)),
                  static_cast<int>(key_bits), static_cast<int>(value_bits), size_of(type));
  const Tensor keys = with_contiguous_rows(key), values = with_contiguous_rows(value);
  const Tensor factors = contiguous(balance);
  const NewTokens k = new_tokens(keys), v = new_tokens(values);
  const int64_t tiles = key.size(0), heads = key.size(1);
  const float* lambda = factors.const_data_ptr<float>();
  const int64_t lambda_step = balance.size(0) == 1 ? 0 : heads * f.key_dim;
  Tensor out = empty({tiles, heads, f.record_bytes}, ScalarType::Byte);
  auto* to = out.mutable_data_ptr<uint8_t>();
  const Kernels& kernels = active();
  run_parallel(tiles * heads, [&](int64_t begin, int64_t end) {
    TileBuffer buffer(f);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t tile = i / heads, head = i % heads;
      uint8_t* record = to + i * f.record_bytes;
      if (f.pass_through()) {
        std::fill_n(record, f.record_bytes, uint8_t{0});
        const int64_t kb = f.key_dim * size_of(type), vb = f.value_dim * size_of(type);
        for (int t = 0; t < kTileTokens; ++t) {
          std::copy_n(at(k, type, tile, head, t), kb, record + f.key_code + t * kb);
          std::copy_n(at(v, type, tile, head, t), vb, record + f.value_code + t * vb);
        }
        continue;
      }
      for (int t = 0; t < kTileTokens; ++t) {
        const auto load = kernels.transform->load_bounded;
        load(at(k, type, tile, head, t), type, &buffer.key[t * f.key_dim], f.key_dim);
        load(at(v, type, tile, head, t), type, &buffer.value[t * f.value_dim], f.value_dim);
      }
      encode_tile(kernels, f, lambda + tile * lambda_step + head * f.key_dim, 0, buffer, record);
    }
  });
  return out;
}

void quantize_tile_inplace(Tensor& tiles, const Tensor& block_table, Tensor& balance,
                           Tensor& exact_key, Tensor& exact_value, Tensor& lengths,
                           const Tensor& key, const Tensor& value, int64_t key_bits,
                           int64_t value_bits, int64_t sink_tokens, int64_t residual_length,
                           int64_t quantized_start) {
  const Layout layout = check_state({tiles, block_table, balance, exact_key, exact_value, lengths},
                                    key_bits, value_bits, sink_tokens);
  const Float type = check_new_tokens(key, value);
  check_dtype("key", key, exact_key.scalar_type());
  check_size("key", key, 0, exact_key.size(0), "batch");
  check_size("key", key, 1, exact_key.size(1), "kv heads");
  check_size("key", key, 3, exact_key.size(3), "key dim");
  check_size("value", value, 3, exact_value.size(3), "value dim");
  check_not_negative("residual_length", residual_length);
  check_not_negative("quantized_start", quantized_start);
  const std::pair<const char*, const Tensor*> written[] = {{"tiles", &tiles},
                                                           {"balance", &balance},
                                                           {"exact_key", &exact_key},
                                                           {"exact_value", &exact_value},
                                                           {"lengths", &lengths}};
  for (auto [name, tensor] : written)
    if (!tensor->is_contiguous())
      value_error(std::string(name) + " is written in place and must be contiguous, got shape " +
                  shape_text(*tensor));

  const Tensor table = contiguous(block_table);
  LayerState state{layout,
                   type,
                   exact_key.size(0),
                   exact_key.size(1),
                   tiles.size(0),
                   table.size(1),
                   exact_key.size(2),
                   sink_tokens,
                   tiles.mutable_data_ptr<uint8_t>(),
                   table.const_data_ptr<int32_t>(),
                   balance.mutable_data_ptr<float>(),
                   exact_key.mutable_data_ptr(),
                   exact_value.mutable_data_ptr(),
                   lengths.mutable_data_ptr<int32_t>()};
  const AppendRule rule{residual_length, quantized_start};
  check_lengths(state.lengths, state.block_table, state.batch, state.max_pages, state.pages,
                state.capacity, sink_tokens);
  check_append(state, key.size(2), rule);
  const Tensor keys = with_contiguous_rows(key), values = with_contiguous_rows(value);
  append(active(), state, new_tokens(keys), new_tokens(values), key.size(2), rule, run_parallel);
}

std::tuple<Tensor, Tensor> dequantize_tile(const Tensor& tiles, const Tensor& balance,
                                           int64_t key_bits, int64_t value_bits, int64_t value_dim,
                                           ScalarType dtype) {
  check_rank("tiles", tiles, 3);
  check_dtype("tiles", tiles, ScalarType::Byte);
  check_rank("balance", balance, 3);
  const int64_t count = tiles.size(0), heads = tiles.size(1);
  check_tile_balance(balance, count, heads, balance.size(2));
  check_head_dim("key_dim", balance.size(2));
  check_head_dim("value_dim", value_dim);
  check_bits(key_bits, value_bits);
  const Float type = float_type("dtype", dtype);
  Tensor key = empty({count, heads, kTileTokens, balance.size(2)}, dtype);
  Tensor value = empty({count, heads, kTileTokens, value_dim}, dtype);
  const Layout f =
      make_layout(static_cast<int>(balance.size(2)), static_cast<int>(value_dim),
                  static_cast<int>(key_bits), static_cast<int>(value_bits), size_of(type));
  check_size("tiles", tiles, 2, f.record_bytes, "record_bytes");
  const Tensor records = contiguous(tiles);
  const Tensor factors = contiguous(balance);
  const float* lambda = factors.const_data_ptr<float>();
  const int64_t lambda_step = balance.size(0) == 1 ? 0 : heads * f.key_dim;
  const auto* from = records.const_data_ptr<uint8_t>();
  auto* key_to = static_cast<uint8_t*>(key.mutable_data_ptr());
  auto* value_to = static_cast<uint8_t*>(value.mutable_data_ptr());
  const int64_t key_count = kTileTokens * f.key_dim, value_count = kTileTokens * f.value_dim;
  const Kernels& kernels = active();
  run_parallel(count * heads, [&](int64_t begin, int64_t end) {
    TileBuffer buffer(f);
    for (int64_t i = begin; i < end; ++i) {
      const uint8_t* record = from + i * f.record_bytes;
      uint8_t* k = key_to + i * key_count * size_of(type);
      uint8_t* v = value_to + i * value_count * size_of(type);
      if (f.pass_through()) {
        std::copy_n(record + f.key_code, key_count * size_of(type), k);
        std::copy_n(record + f.value_code, value_count * size_of(type), v);
        continue;
      }
      decode_tile(kernels, f, lambda + i / heads * lambda_step + i % heads * f.key_dim, record,
                  buffer);
      kernels.transform->store(buffer.key.data(), k, type, key_count);
      kernels.transform->store(buffer.value.data(), v, type, value_count);
    }
  });
  return {key, value};
}

}  // namespace
}  // namespace kvq

STABLE_TORCH_LIBRARY_IMPL(kvq, CPU, m) {
  m.impl("key_balance", TORCH_BOX(&kvq::key_balance_op));
  m.impl("quantize_tile", TORCH_BOX(&kvq::quantize_tile));
  m.impl("quantize_tile_", TORCH_BOX(&kvq::quantize_tile_inplace));
  m.impl("dequantize_tile", TORCH_BOX(&kvq::dequantize_tile));
}
