#include "ops_cpu/half.h"
#include "ops_cpu/kernels.h"

namespace kvq::scalar {
namespace {

void load(const void* in, Float type, float* out, int64_t count) {
  const auto* half = static_cast<const uint16_t*>(in);
  if (type == Float::kFloat32) {
    std::memcpy(out, in, count * sizeof(float));
  } else if (type == Float::kFloat16) {
    for (int64_t i = 0; i < count; ++i) out[i] = half_to_float(half[i]);
  } else {
    for (int64_t i = 0; i < count; ++i) out[i] = bfloat_to_float(half[i]);
  }
}

void load_bounded(const void* in, Float type, float* out, int dim) {
  load(in, type, out, dim);
  for (int d = 0; d < dim; ++d) {
    const float v = out[d] == out[d] ? out[d] : 0.0f;
    out[d] = v > kLargestInput ? kLargestInput : v < -kLargestInput ? -kLargestInput : v;
  }
}

void store(const float* in, void* out, Float type, int64_t count) {
  auto* half = static_cast<uint16_t*>(out);
  if (type == Float::kFloat32) {
    std::memcpy(out, in, count * sizeof(float));
  } else if (type == Float::kFloat16) {
    for (int64_t i = 0; i < count; ++i) half[i] = float_to_half(in[i]);
  } else {
    for (int64_t i = 0; i < count; ++i) half[i] = float_to_bfloat(in[i]);
  }
}

void sylvester(float* x, int length) {
  for (int h = 1; h < length; h *= 2)
    for (int i = 0; i < length; i += 2 * h)
      for (int j = i; j < i + h; ++j) {
        const float a = x[j], b = x[j + h];
        x[j] = a + b;
        x[j + h] = a - b;
      }
}

// Row i of the matrix (or column, transposed) over blocks of `length` channels.
void outer(float* x, const Rotation& r, bool transposed) {
  float y[kMaxHeadDim];
  const int n = r.order, length = r.block;
  for (int i = 0; i < n; ++i)
    for (int c = 0; c < length; ++c) {
      float sum = 0.0f;
      for (int j = 0; j < n; ++j) {
        const float v = x[j * length + c];
        sum = (transposed ? r.matrix[j * n + i] : r.matrix[i * n + j]) > 0 ? sum + v : sum - v;
      }
      y[i * length + c] = sum;
    }
  std::memcpy(x, y, sizeof(float) * r.dim);
}

void blocks(float* x, const Rotation& r) {
  for (int i = 0; i < r.dim; i += r.block) sylvester(x + i, r.block);
}

void scale(float* x, const Rotation& r) {
  for (int i = 0; i < r.dim; ++i) x[i] = x[i] * r.norm;
}

void fwht(float* x, const Rotation& r) {
  blocks(x, r);
  if (r.matrix) outer(x, r, false);
  scale(x, r);
}

void fwht_inverse(float* x, const Rotation& r) {
  if (r.matrix) outer(x, r, true);
  blocks(x, r);
  scale(x, r);
}

}  // namespace

const TransformKernels transform{load, load_bounded, store, fwht, fwht_inverse};

}  // namespace kvq::scalar
