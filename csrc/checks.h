// Argument checks of the bindings; the Python twin with the same messages is torch_kvq/_checks.py.
// std::invalid_argument arrives in Python as ValueError, std::out_of_range as IndexError.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "ops_cpu/append.h"
#include "ops_cpu/format.h"
#include "ops_cpu/kernels.h"

namespace kvq {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

std::string shape_text(const Tensor& tensor);

[[noreturn]] void value_error(const std::string& message);

void check_rank(const char* name, const Tensor& tensor, int64_t rank);
void check_size(const char* name, const Tensor& tensor, int64_t dim, int64_t size,
                const char* owner);
void check_dtype(const char* name, const Tensor& tensor, ScalarType type);
void check_head_dim(const char* name, int64_t dim);
void check_bits(int64_t key_bits, int64_t value_bits);
void check_not_negative(const char* name, int64_t value);

// float32, float16 or bfloat16.
Float float_type(const char* name, ScalarType type);
Float float_type(const char* name, const Tensor& tensor);

// New keys [batch, kv_heads, tokens, dim] and values of the same dtype.
Float check_new_tokens(const Tensor& key, const Tensor& value);

// float32 [tiles or 1, kv_heads, key_dim].
void check_tile_balance(const Tensor& balance, int64_t tiles, int64_t kv_heads, int64_t key_dim);

// The six tensors of a layer's state.
struct StateTensors {
  const Tensor &tiles, &block_table, &balance, &exact_key, &exact_value, &lengths;
};
Layout check_state(const StateTensors& state, int64_t key_bits, int64_t value_bits,
                   int64_t sink_tokens);

}  // namespace kvq
