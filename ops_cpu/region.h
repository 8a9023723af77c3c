// Compile the functions between BEGIN and END for an instruction set without build flags. System
// headers are included before the region, or their inline functions would be compiled for it too.
#pragma once

#define KVQ_STRING_(x) #x
#define KVQ_STRING(x) KVQ_STRING_(x)
#if defined(__clang__)
#define KVQ_TARGET_BEGIN(T) \
  _Pragma(KVQ_STRING(clang attribute push(__attribute__((target(T))), apply_to = function)))
#define KVQ_TARGET_END _Pragma("clang attribute pop")
#else
#define KVQ_TARGET_BEGIN(T) _Pragma("GCC push_options") _Pragma(KVQ_STRING(GCC target(T)))
#define KVQ_TARGET_END _Pragma("GCC pop_options")
#endif

// For what the compiler's limits would leave as calls in the innermost loops, lambdas among them.
#define KVQ_ALWAYS_INLINE __attribute__((always_inline))
