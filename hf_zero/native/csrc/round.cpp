// Rounding of fp32 to the digits of fp16 at random: fp8/stochastic_rounding.py has the same by torch's operations.
#include <algorithm>
#include <cstdint>

#include "convert.h"
#include "hz_api.h"
#include "pool.h"
#include "simd.h"

namespace hz {
namespace {

constexpr int64_t kTask = 65536;  // elements
// Below it a second thread costs more than it brings.
constexpr int64_t kMinPerThread = 32768;
constexpr uint32_t kLow = (1u << 13) - 1;  // the digits that fp16 has not
constexpr uint32_t kExponent = 0x7f800000u;

// The last step of MurmurHash3.
HZ_INLINE uint32_t mixed(uint32_t number) {
    number = (number ^ (number >> 16)) * 0x85ebca6bu;
    number = (number ^ (number >> 13)) * 0xc2b2ae35u;
    return number ^ (number >> 16);
}

HZ_INLINE void round_range(float* values, int64_t numel, uint32_t first, uint32_t seed) {
    HZ_NO_OVERLAP
    for (int64_t i = 0; i < numel; ++i) {
        const uint32_t bits = bits_of(values[i]);
        const uint32_t noise = mixed((first + static_cast<uint32_t>(i)) * 0x9e3779b1u + seed) & kLow;
        const uint32_t is_finite = mask_of((bits & kExponent) != kExponent);
        values[i] = float_of(choose(is_finite, (bits + noise) & ~kLow, bits));
    }
}

using RoundKernel = void (*)(float*, int64_t, uint32_t, uint32_t);

void round_default(float* values, int64_t numel, uint32_t first, uint32_t seed) {
    round_range(values, numel, first, seed);
}
HZ_TARGET_V3 void round_v3(float* values, int64_t numel, uint32_t first, uint32_t seed) {
    round_range(values, numel, first, seed);
}
HZ_TARGET_V4 void round_v4(float* values, int64_t numel, uint32_t first, uint32_t seed) {
    round_range(values, numel, first, seed);
}

struct Round {
    RoundKernel kernel;
    float* values;
    int64_t numel;
    uint32_t first, seed;
};

}  // namespace
}  // namespace hz

int32_t hz_round_fp16(float* values, int64_t numel, int64_t first, uint32_t seed, int32_t threads, int32_t simd) {
    using namespace hz;
    const RoundKernel kernels[kNumLevels] = {round_default, round_v3, round_v4};
    const int level = simd_level(simd);
    if (level < 0) return -1;
    Round round{kernels[level], values, numel, static_cast<uint32_t>(first), seed};
    const auto task = [](void* pointer, int64_t index) {
        const Round& r = *static_cast<Round*>(pointer);
        const int64_t start = index * kTask;
        r.kernel(r.values + start, std::min(kTask, r.numel - start), r.first + static_cast<uint32_t>(start), r.seed);
    };
    const int64_t worth = std::min<int64_t>(threads, numel / kMinPerThread + 1);
    return run_tasks(task, &round, (numel + kTask - 1) / kTask, static_cast<int>(worth));
}
