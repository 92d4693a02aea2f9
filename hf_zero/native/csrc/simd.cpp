// Finds the instruction sets of the CPU, and answers the general questions of the library.
#include "simd.h"

namespace hz {
namespace {

int best_level() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    // These also ask whether the system saves the wide registers.
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
        return HZ_SIMD_V4;
    }
    if (__builtin_cpu_supports("avx2")) return HZ_SIMD_V3;
#endif
    return HZ_SIMD_DEFAULT;
}

}  // namespace

int simd_level(int wanted) {
    static const int best = best_level();
    if (wanted == HZ_SIMD_AUTO) return best;
    return wanted >= HZ_SIMD_DEFAULT && wanted <= best ? wanted : -1;
}

}  // namespace hz

int32_t hz_abi_version(void) { return HZ_ABI_VERSION; }

int32_t hz_simd_level(void) { return hz::simd_level(HZ_SIMD_AUTO); }
