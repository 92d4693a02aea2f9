// The instruction sets that a kernel is compiled for, and the choice for this CPU.
//
// A kernel is a template whose body is inlined into one function per level; the level picks the function at run time.
// The levels name single features instead of arch=x86-64-v3 or v4: nothing that has not been tested for is used.
#pragma once

#include "hz_api.h"

#define HZ_INLINE inline __attribute__((always_inline))

#if defined(__x86_64__)
#define HZ_TARGET_V3 __attribute__((target("avx2")))
#if defined(__clang__)
#define HZ_TARGET_V4 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
#else
#define HZ_TARGET_V4 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")))
#endif
#else
// Elsewhere the compiler's default is the only level (on aarch64 that is NEON).
#define HZ_TARGET_V3
#define HZ_TARGET_V4
#endif

// Stands before a loop over arrays that never overlap.
#if defined(__clang__)
#define HZ_NO_OVERLAP _Pragma("clang loop vectorize(assume_safety)")
#else
#define HZ_NO_OVERLAP _Pragma("GCC ivdep")
#endif

namespace hz {

constexpr int kNumLevels = 3;

// `wanted` if this CPU has it, the best level for HZ_SIMD_AUTO, or -1.
int simd_level(int wanted);

}  // namespace hz
