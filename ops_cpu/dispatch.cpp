#include <atomic>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "ops_cpu/kernels.h"

namespace kvq {
namespace {

struct Tiers {
  const Kernels scalar{"scalar",
                       &scalar::transform,
                       &scalar::encode,
                       &scalar::softmax,
                       &scalar::packed_attention,
                       &scalar::exact_attention,
                       &scalar::far_encode,
                       &scalar::far_attention,
                       &scalar::x};
#if defined(__x86_64__)
  const Kernels avx2{"avx2",
                     &avx2::transform,
                     &avx2::encode,
                     &avx2::softmax,
                     &avx2::packed_attention,
                     &avx2::exact_attention,
                     &avx2::far_encode,
                     &avx2::far_attention,
                     &avx2::x};
  const Kernels avx512vnni{"avx512vnni",
                           &avx512vnni::transform,
                           &avx512vnni::encode,
                           &avx512vnni::softmax,
                           &avx512vnni::packed_attention,
                           &avx512vnni::exact_attention,
                           &avx512vnni::far_encode,
                           &avx512vnni::far_attention,
                           &avx512vnni::x};
#endif
  const Kernels* list[8] = {};

  Tiers() {
    int n = 0;
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                          __builtin_cpu_supports("f16c");
    if (has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vbmi"))
      list[n++] = &avx512vnni;
    if (has_avx2) list[n++] = &avx2;
#endif
    list[n++] = &scalar;
  }
};

const Tiers& tiers() {
  static const Tiers instance;
  return instance;
}

const Kernels* find(const char* name) {
  std::string known;
  for (auto p = tiers().list; *p; ++p) {
    if (!std::strcmp((*p)->name, name)) return *p;
    known += std::string(known.empty() ? "" : ", ") + (*p)->name;
  }
  throw std::invalid_argument("TORCH_KVQ_CPU_CAPABILITY must be one of " + known + ", got '" +
                              name + "'");
}

std::atomic<const Kernels*> chosen{nullptr};

}  // namespace

const Kernels* const* available() { return tiers().list; }

const Kernels& active() {
  const Kernels* kernels = chosen.load(std::memory_order_relaxed);
  if (!kernels) {
    const char* forced = std::getenv("TORCH_KVQ_CPU_CAPABILITY");
    kernels = forced && *forced ? find(forced) : *tiers().list;
    chosen.store(kernels, std::memory_order_relaxed);
  }
  return *kernels;
}

void force(const char* name) { chosen.store(find(name), std::memory_order_relaxed); }

}  // namespace kvq
