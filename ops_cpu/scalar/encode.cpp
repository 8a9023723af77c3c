#include "ops_cpu/kernels.h"
#include "ops_cpu/scalar/lanes.h"

namespace kvq::scalar {
namespace {

float sum_of_squares(const float* z, int dim) { return dot(z, z, dim); }

void write_codes(const float* z, int dim, int bits, float step, uint8_t* codes) {
  const Codebook& book = codebook(bits);
  for (int d = 0; d < dim; ++d) {
    const float u = z[d] * step;
    int code = 0;
    for (int m = 0; m + 1 < book.count; ++m) code += book.midpoint[m] <= u;
    codes[d] = static_cast<uint8_t>(code);
  }
}

void try_step(const float* z, int dim, int bits, float step, float* product, float* norm) {
  const Codebook& book = codebook(bits);
  uint8_t codes[kMaxHeadDim];
  int8_t levels[kMaxHeadDim];
  write_codes(z, dim, bits, step, codes);
  int squares = 0;
  for (int d = 0; d < dim; ++d) {
    levels[d] = book.level[codes[d]];
    squares += levels[d] * levels[d];
  }
  *product = dot(z, levels, dim);
  *norm = static_cast<float>(squares);
}

}  // namespace

const EncodeKernels encode{sum_of_squares, try_step, write_codes};

}  // namespace kvq::scalar
