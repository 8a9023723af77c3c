// Tensors and threads of torch for the bindings. What needs no operator calls none: a call by name
// costs about as much as attention over a few dozen tokens.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "ops_cpu/append.h"

namespace kvq {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// An uninitialised contiguous tensor on the CPU.
Tensor empty(const std::vector<int64_t>& sizes, ScalarType type);

// The tensor itself when it is contiguous, a copy otherwise.
Tensor contiguous(const Tensor& tensor);

// The same for its last dimension alone.
Tensor with_contiguous_rows(const Tensor& tensor);

// A tensor [batch, kv_heads, tokens, dim] with contiguous rows.
NewTokens new_tokens(const Tensor& tensor);

// torch's thread pool behind the torch-free drivers.
void run_parallel(int64_t count, const std::function<void(int64_t, int64_t)>& body);

}  // namespace kvq
