// Messages of 8-bit blocks: distributed/block_quantization.py says what they are, and has the same by torch's
// operations.
#include <algorithm>
#include <cfloat>
#include <cstdint>
#include <cstring>

#include "convert.h"
#include "hz_api.h"
#include "pool.h"
#include "simd.h"

namespace hz {
namespace {

constexpr int64_t kBlock = 256;  // elements
constexpr int64_t kTask = 256;   // blocks
// Below it a second thread costs more than it brings.
constexpr int64_t kMinPerThread = 65536;
constexpr int64_t kScale = 4;  // bytes
// 1.5 * 2 ** 23: a small number and this make a sum whose last bits are the nearest integer, at a tie the even one.
constexpr float kRounder = 12582912;

// A block: its elements, and where a message has its scale and its integers.
template <class T>
struct Block {
    T* values;
    int64_t numel;
    char* scale;
    int8_t* integers;
};

struct Work {
    char* values;  // what is quantized, or becomes the sum
    int64_t numel;
    char* messages;
    int64_t num_messages;

    int64_t num_blocks() const { return (numel + kBlock - 1) / kBlock; }
    int64_t message_bytes() const { return num_blocks() * kScale + numel; }

    template <class T>
    HZ_INLINE Block<T> block(int64_t index) const {
        const int64_t start = index * kBlock;
        char* const integers = messages + num_blocks() * kScale + start;
        return {reinterpret_cast<T*>(values) + start, std::min(kBlock, numel - start), messages + index * kScale,
                reinterpret_cast<int8_t*>(integers)};
    }
};

template <class T>
HZ_INLINE void quantize(const Work& work, int64_t first, int64_t end) {
    float values[kBlock];
    for (int64_t index = first; index < end; ++index) {
        const Block<T> block = work.block<T>(index);
        // The bits of magnitudes are ordered as magnitudes are, with NaN above infinity.
        int32_t largest = 0;
        HZ_NO_OVERLAP
        for (int64_t i = 0; i < block.numel; ++i) {
            values[i] = static_cast<float>(widen(block.values[i]));
            const int32_t magnitude = static_cast<int32_t>(bits_of(values[i]) & 0x7fffffffu);
            largest = magnitude > largest ? magnitude : largest;
        }
        float scale = float_of(static_cast<uint32_t>(largest)) / 127;
        if (scale < FLT_MIN) scale = FLT_MIN;  // NaN stays
        std::memcpy(block.scale, &scale, kScale);
        HZ_NO_OVERLAP
        for (int64_t i = 0; i < block.numel; ++i) {
            block.integers[i] = static_cast<int8_t>(bits_of(values[i] / scale + kRounder));
        }
    }
}

template <class T>
HZ_INLINE void sum(const Work& work, int64_t first, int64_t end) {
    float sums[kBlock];
    for (int64_t index = first; index < end; ++index) {
        const Block<T> block = work.block<T>(index);
        for (int64_t row = 0; row < work.num_messages; ++row) {
            const int8_t* const integers = block.integers + row * work.message_bytes();
            float scale;
            std::memcpy(&scale, block.scale + row * work.message_bytes(), kScale);
            if (row == 0) {
                HZ_NO_OVERLAP
                for (int64_t i = 0; i < block.numel; ++i) sums[i] = static_cast<float>(integers[i]) * scale;
            } else {
                HZ_NO_OVERLAP
                for (int64_t i = 0; i < block.numel; ++i) sums[i] += static_cast<float>(integers[i]) * scale;
            }
        }
        HZ_NO_OVERLAP
        for (int64_t i = 0; i < block.numel; ++i) narrow(sums[i], block.values[i]);
    }
}

// The two loops at a level.
#define HZ_LOOPS(Level, TARGET)                                                                                        \
    struct Level {                                                                                                     \
        template <class T>                                                                                             \
        TARGET static void quantize(const Work& work, int64_t first, int64_t end) {                                    \
            hz::quantize<T>(work, first, end);                                                                         \
        }                                                                                                              \
        template <class T>                                                                                             \
        TARGET static void sum(const Work& work, int64_t first, int64_t end) {                                         \
            hz::sum<T>(work, first, end);                                                                              \
        }                                                                                                              \
    };
HZ_LOOPS(Default, )
HZ_LOOPS(V3, HZ_TARGET_V3)
HZ_LOOPS(V4, HZ_TARGET_V4)

using Kernel = void (*)(const Work&, int64_t, int64_t);

struct Kernels {
    Kernel quantize, sum;
};

template <class Level>
Kernels kernels_at(int type) {
    switch (type) {
        case HZ_F32: return {Level::template quantize<float>, Level::template sum<float>};
        case HZ_F64: return {Level::template quantize<double>, Level::template sum<double>};
        case HZ_BF16: return {Level::template quantize<bf16>, Level::template sum<bf16>};
        case HZ_F16: return {Level::template quantize<f16>, Level::template sum<f16>};
        default: return {nullptr, nullptr};
    }
}

Kernels kernels_for(int type, int simd) {
    switch (simd_level(simd)) {
        case HZ_SIMD_DEFAULT: return kernels_at<Default>(type);
        case HZ_SIMD_V3: return kernels_at<V3>(type);
        case HZ_SIMD_V4: return kernels_at<V4>(type);
        default: return {nullptr, nullptr};
    }
}

int32_t run(Kernel kernel, Work work, int32_t threads) {
    if (!kernel) return -1;
    struct Context {
        Kernel kernel;
        Work work;
    } context{kernel, work};
    const auto task = [](void* pointer, int64_t index) {
        const Context& c = *static_cast<Context*>(pointer);
        c.kernel(c.work, index * kTask, std::min(c.work.num_blocks(), (index + 1) * kTask));
    };
    const int64_t worth = std::min<int64_t>(threads, work.numel * work.num_messages / kMinPerThread + 1);
    return run_tasks(task, &context, (work.num_blocks() + kTask - 1) / kTask, static_cast<int>(worth));
}

}  // namespace
}  // namespace hz

int32_t hz_quantize(const void* values, int32_t type, int64_t numel, void* message, int32_t threads, int32_t simd) {
    const hz::Work work{static_cast<char*>(const_cast<void*>(values)), numel, static_cast<char*>(message), 1};
    return hz::run(hz::kernels_for(type, simd).quantize, work, threads);
}

int32_t hz_sum_messages(const void* messages, int64_t num_messages, void* sum, int32_t type, int64_t numel,
                        int32_t threads, int32_t simd) {
    char* const first = static_cast<char*>(const_cast<void*>(messages));
    return hz::run(hz::kernels_for(type, simd).sum, {static_cast<char*>(sum), numel, first, num_messages}, threads);
}
