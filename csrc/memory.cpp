#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace kvq {
namespace {

using torch::stable::Tensor;

// Ask for huge pages under the whole ones that a tensor covers: tiles of one head lie a page of the
// cache apart, and each would cost a look-up of its address.
void advise_huge_pages(const Tensor& tiles) {
#if defined(__linux__)
  constexpr uintptr_t kHugePage = 2u << 20;
  const auto begin = reinterpret_cast<uintptr_t>(tiles.const_data_ptr());
  const uintptr_t end = begin + static_cast<uintptr_t>(tiles.numel()) * tiles.element_size();
  const uintptr_t first = (begin + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t last = end / kHugePage * kHugePage;
  // A refusal costs speed and nothing else.
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#else
  (void)tiles;
#endif
}

}  // namespace
}  // namespace kvq

STABLE_TORCH_LIBRARY_IMPL(kvq, CPU, m) {
  m.impl("_advise_huge_pages", TORCH_BOX(&kvq::advise_huge_pages));
}
