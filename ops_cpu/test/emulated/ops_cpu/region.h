// In place of ops_cpu/region.h: compiled for AVX-512, the kernels would not run where it is
// emulated.
#pragma once

#define KVQ_TARGET_BEGIN(T)
#define KVQ_TARGET_END
#define KVQ_ALWAYS_INLINE
