#include <torch/csrc/stable/library.h>

#include <optional>

#include "csrc/checks.h"
#include "csrc/tensors.h"

namespace kvq {
namespace {

Tensor fwht(const Tensor& x, std::optional<Tensor> signs, bool inverse) {
  const Float type = float_type("x", x);
  const int64_t dim = x.dim() ? x.size(x.dim() - 1) : 0;
  check_head_dim("x.shape[-1]", dim);
  std::optional<Tensor> sign;
  if (signs) {
    check_rank("signs", *signs, 1);
    check_dtype("signs", *signs, ScalarType::Float);
    check_size("signs", *signs, 0, dim, "x.shape[-1]");
    sign = contiguous(*signs);
  }
  const Tensor in = contiguous(x);
  Tensor out = empty({x.sizes().begin(), x.sizes().end()}, x.scalar_type());
  const auto* from = static_cast<const uint8_t*>(in.const_data_ptr());
  auto* to = static_cast<uint8_t*>(out.mutable_data_ptr());
  const float* s = sign ? sign->const_data_ptr<float>() : nullptr;
  const TransformKernels& k = *active().transform;
  const Rotation& r = rotation(static_cast<int>(dim));
  run_parallel(x.numel() / dim, [&](int64_t begin, int64_t end) {
    float row[kMaxHeadDim];
    for (int64_t i = begin; i < end; ++i) {
      k.load(from + i * dim * size_of(type), type, row, dim);
      if (s && !inverse)
        for (int64_t d = 0; d < dim; ++d) row[d] *= s[d];
      (inverse ? k.fwht_inverse : k.fwht)(row, r);
      if (s && inverse)
        for (int64_t d = 0; d < dim; ++d) row[d] *= s[d];
      k.store(row, to + i * dim * size_of(type), type, dim);
    }
  });
  return out;
}

}  // namespace
}  // namespace kvq

STABLE_TORCH_LIBRARY_IMPL(kvq, CPU, m) { m.impl("fwht", TORCH_BOX(&kvq::fwht)); }
