#include "csrc/checks.h"

#include <stdexcept>

namespace kvq {

std::string shape_text(const Tensor& tensor) {
  std::string text = "(";
  const auto sizes = tensor.sizes();
  for (size_t i = 0; i < sizes.size(); ++i) text += (i ? ", " : "") + std::to_string(sizes[i]);
  return text + (sizes.size() == 1 ? ",)" : ")");
}

void value_error(const std::string& message) { throw std::invalid_argument(message); }

namespace {
std::string type_text(ScalarType type) {
  switch (type) {
    case ScalarType::Float:
      return "torch.float32";
    case ScalarType::Double:
      return "torch.float64";
    case ScalarType::Half:
      return "torch.float16";
    case ScalarType::BFloat16:
      return "torch.bfloat16";
    case ScalarType::Byte:
      return "torch.uint8";
    case ScalarType::Int:
      return "torch.int32";
    case ScalarType::Long:
      return "torch.int64";
    case ScalarType::Bool:
      return "torch.bool";
    default:
      return torch::headeronly::toString(type);
  }
}
}  // namespace

void check_rank(const char* name, const Tensor& tensor, int64_t rank) {
  if (tensor.dim() != rank)
    value_error(std::string(name) + " must have " + std::to_string(rank) +
                " dimensions, got shape " + shape_text(tensor));
}

void check_size(const char* name, const Tensor& tensor, int64_t dim, int64_t size,
                const char* owner) {
  if (tensor.size(dim) != size)
    value_error(std::string(name) + ".shape[" + std::to_string(dim) + "] must be " +
                std::to_string(size) + " (" + owner + "), got shape " + shape_text(tensor));
}

void check_dtype(const char* name, const Tensor& tensor, ScalarType type) {
  if (tensor.scalar_type() != type)
    value_error(std::string(name) + " must be " + type_text(type) + ", got " +
                type_text(tensor.scalar_type()));
}

void check_head_dim(const char* name, int64_t dim) {
  if (!valid_head_dim(dim))
    value_error(std::string(name) + " must be a multiple of 16 from 32 to 512, got " +
                std::to_string(dim));
}

void check_bits(int64_t key_bits, int64_t value_bits) {
  if (!valid_bits(key_bits, value_bits))
    value_error("key_bits and value_bits must each be 2, 3 or 4, or both 16, got key_bits=" +
                std::to_string(key_bits) + ", value_bits=" + std::to_string(value_bits));
}

void check_not_negative(const char* name, int64_t value) {
  if (value < 0)
    value_error(std::string(name) + " must not be negative, got " + std::to_string(value));
}

Float float_type(const char* name, ScalarType type) {
  switch (type) {
    case ScalarType::Float:
      return Float::kFloat32;
    case ScalarType::Half:
      return Float::kFloat16;
    case ScalarType::BFloat16:
      return Float::kBFloat16;
    default:
      value_error(std::string(name) + " must be float32, float16 or bfloat16, got " +
                  type_text(type));
  }
}

Float float_type(const char* name, const Tensor& tensor) {
  return float_type(name, tensor.scalar_type());
}

Float check_new_tokens(const Tensor& key, const Tensor& value) {
  check_rank("key", key, 4);
  check_rank("value", value, 4);
  const Float type = float_type("key", key);
  check_dtype("value", value, key.scalar_type());
  check_size("value", value, 0, key.size(0), "key.shape[0]");
  check_size("value", value, 1, key.size(1), "key.shape[1]");
  check_size("value", value, 2, key.size(2), "key.shape[2]");
  check_head_dim("key.shape[-1]", key.size(3));
  check_head_dim("value.shape[-1]", value.size(3));
  return type;
}

void check_tile_balance(const Tensor& balance, int64_t tiles, int64_t kv_heads, int64_t key_dim) {
  check_rank("balance", balance, 3);
  check_dtype("balance", balance, ScalarType::Float);
  check_size("balance", balance, 1, kv_heads, "kv heads");
  check_size("balance", balance, 2, key_dim, "key dim");
  if (balance.size(0) != 1 && balance.size(0) != tiles)
    value_error("balance.shape[0] must be 1 or " + std::to_string(tiles) + ", got shape " +
                shape_text(balance));
}

Layout check_state(const StateTensors& s, int64_t key_bits, int64_t value_bits,
                   int64_t sink_tokens) {
  check_rank("exact_key", s.exact_key, 4);
  check_rank("exact_value", s.exact_value, 4);
  float_type("exact_key", s.exact_key);
  check_dtype("exact_value", s.exact_value, s.exact_key.scalar_type());
  check_size("exact_value", s.exact_value, 0, s.exact_key.size(0), "exact_key.shape[0]");
  check_size("exact_value", s.exact_value, 1, s.exact_key.size(1), "exact_key.shape[1]");
  check_size("exact_value", s.exact_value, 2, s.exact_key.size(2), "exact_key.shape[2]");
  const int64_t batch = s.exact_key.size(0), kv_heads = s.exact_key.size(1);
  const int64_t key_dim = s.exact_key.size(3), value_dim = s.exact_value.size(3);
  check_head_dim("key_dim", key_dim);
  check_head_dim("value_dim", value_dim);
  check_bits(key_bits, value_bits);
  const Layout layout = make_layout(static_cast<int>(key_dim), static_cast<int>(value_dim),
                                    static_cast<int>(key_bits), static_cast<int>(value_bits),
                                    static_cast<int>(s.exact_key.element_size()));
  check_rank("tiles", s.tiles, 3);
  check_rank("balance", s.balance, 3);
  check_rank("block_table", s.block_table, 2);
  check_rank("lengths", s.lengths, 2);
  check_dtype("tiles", s.tiles, ScalarType::Byte);
  check_dtype("block_table", s.block_table, ScalarType::Int);
  check_dtype("lengths", s.lengths, ScalarType::Int);
  check_dtype("balance", s.balance, ScalarType::Float);
  check_size("tiles", s.tiles, 1, kv_heads, "kv heads");
  check_size("tiles", s.tiles, 2, layout.record_bytes, "record_bytes");
  check_size("block_table", s.block_table, 0, batch, "batch");
  check_size("lengths", s.lengths, 0, batch, "batch");
  check_size("lengths", s.lengths, 1, kLengthColumns, "start, length, quantized");
  check_size("balance", s.balance, 0, batch, "batch");
  check_size("balance", s.balance, 1, kv_heads, "kv heads");
  check_size("balance", s.balance, 2, key_dim, "key dim");
  check_not_negative("sink_tokens", sink_tokens);
  return layout;
}

}  // namespace kvq
