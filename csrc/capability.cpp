#include <torch/csrc/stable/library.h>

#include <string>

#include "ops_cpu/kernels.h"

namespace kvq {
namespace {

// The active tier, then all of them, separated by commas.
std::string cpu_capabilities() {
  std::string text = active().name;
  for (auto p = available(); *p; ++p) text += std::string(",") + (*p)->name;
  return text;
}

void set_cpu_capability(std::string name) { force(name.c_str()); }

}  // namespace
}  // namespace kvq

STABLE_TORCH_LIBRARY_IMPL(kvq, CompositeExplicitAutograd, m) {
  m.impl("_cpu_capabilities", TORCH_BOX(&kvq::cpu_capabilities));
  m.impl("_set_cpu_capability", TORCH_BOX(&kvq::set_cpu_capability));
}
