#include "csrc/tensors.h"

#include <torch/csrc/stable/ops.h>

namespace kvq {
namespace {

int32_t shim_type(ScalarType type) {
  switch (type) {
    case ScalarType::Float:
      return aoti_torch_dtype_float32();
    case ScalarType::Half:
      return aoti_torch_dtype_float16();
    case ScalarType::BFloat16:
      return aoti_torch_dtype_bfloat16();
    case ScalarType::Int:
      return aoti_torch_dtype_int32();
    case ScalarType::Long:
      return aoti_torch_dtype_int64();
    case ScalarType::Bool:
      return aoti_torch_dtype_bool();
    default:
      return aoti_torch_dtype_uint8();
  }
}

}  // namespace

Tensor empty(const std::vector<int64_t>& sizes, ScalarType type) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t i = sizes.size(); i-- > 1;) strides[i - 1] = strides[i] * sizes[i];
  AtenTensorHandle handle;
  STABLE_TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(),
                               shim_type(type), aoti_torch_device_type_cpu(), 0, &handle));
  return Tensor(handle);
}

Tensor contiguous(const Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}

Tensor with_contiguous_rows(const Tensor& tensor) {
  const int64_t last = tensor.dim() - 1;
  if (tensor.stride(last) == 1 || tensor.size(last) <= 1) return tensor;
  return torch::stable::contiguous(tensor);
}

NewTokens new_tokens(const Tensor& t) {
  return {t.const_data_ptr(), {t.stride(0), t.stride(1), t.stride(2)}};
}

void run_parallel(int64_t count, const std::function<void(int64_t, int64_t)>& body) {
  if (count > 0) torch::stable::parallel_for(0, count, 1, body);
}

}  // namespace kvq
