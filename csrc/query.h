// The query side of an attention call: checks, and where its tensors lie.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <string_view>

#include "ops_cpu/attention.h"

namespace kvq {

using torch::stable::Tensor;

struct QueryArguments {
  const Tensor& query;
  const std::optional<Tensor>& attn_mask;
  std::optional<double> scale;
  bool is_causal;
  std::optional<int64_t> sliding_window;
  std::optional<double> softcap;
  const std::optional<Tensor>& sinks;
  std::string_view precision;
};

// Tensors that the pointers of a call lead into.
struct QueryTensors {
  Tensor query;
  std::optional<Tensor> mask, sinks;
};

// Strides of all but the last dimension, 0 where the size is 1 so that the tensor broadcasts.
template <size_t N>
void read_strides(const Tensor& tensor, int64_t (&out)[N]) {
  for (size_t i = 0; i < N; ++i) out[i] = tensor.size(i) == 1 ? 0 : tensor.stride(i);
}

// Checks what can be checked without data and sets the sizes of the call, whose layout, batch and
// KV heads are there.
void check_query(AttentionCall& call, const QueryArguments& arguments);

// Sets the rest, when the lengths are there and checked.
QueryTensors read_query(AttentionCall& call, const QueryArguments& arguments);

}  // namespace kvq
