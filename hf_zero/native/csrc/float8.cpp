// Casts of the segments of a 1-D memory to narrow types and back, each segment with its scale, in one pass over memory.
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <type_traits>
#include <vector>

#include "convert.h"
#include "float8_convert.h"
#include "hz_api.h"
#include "pool.h"
#include "simd_stream.h"

namespace hz {
namespace {

// Elements of a task: some 10 us of work, and whole lines of every type.
constexpr int64_t kTask = 65536;
// Below it a second thread costs more than it brings.
constexpr int64_t kMinPerThread = 65536;
// From here on narrow results would not stay in a cache until somebody reads them: past the caches a cast is a tenth
// faster. An uncast, which writes four times what it reads, is a tenth slower so.
constexpr int64_t kStreamFrom = 1 << 20;
// Bytes of a block of streamed results. Half of it is 4% slower, twice as much no faster.
constexpr int64_t kBlock = 1024;

// Elements that are measured before they are cast: in the nearest cache in between.
constexpr int64_t kChunk = 1024;

// The bits of a magnitude, which are ordered as magnitudes are, with NaN above infinity.
HZ_INLINE int32_t ordered(float value) { return static_cast<int32_t>(bits_of(value) & ~kFloatSign); }
HZ_INLINE int16_t ordered(bf16 value) { return static_cast<int16_t>(value.bits & 0x7fff); }
HZ_INLINE int16_t ordered(f16 value) { return static_cast<int16_t>(value.bits & 0x7fff); }

// The magnitude of an S with these bits.
template <class S>
HZ_INLINE float magnitude_of(int32_t ordered) {
    if constexpr (std::is_same_v<S, float>) return float_of(static_cast<uint32_t>(ordered));
    else return widen(S{static_cast<uint16_t>(ordered)});
}

// Holds the largest magnitude of a chunk, as `ordered` has it, and the least that is not zero, less one.
template <class Order>
struct Extremes {
    Order largest;
    std::make_unsigned_t<Order> least;
};

template <class S, class Order = decltype(ordered(S()))>
HZ_INLINE Extremes<Order> extremes_of(const S* source, int64_t numel) {
    using Unsigned = std::make_unsigned_t<Order>;
    Order largest = 0;
    Unsigned least = std::numeric_limits<Unsigned>::max();
    HZ_NO_OVERLAP
    for (int64_t i = 0; i < numel; ++i) {
        const Order one = ordered(source[i]);
        const Unsigned below = static_cast<Unsigned>(one - 1);  // the largest number there is where `one` is zero
        largest = one > largest ? one : largest;
        least = below < least ? below : least;
    }
    return {largest, least};
}

// The ways to cast a chunk, each with fewer operations than the one before.
enum class Way { kAny, kInRange, kShift };

template <class S, class N>
HZ_INLINE Way way_for(Extremes<decltype(ordered(S()))> found, float scale) {
    if (!(magnitude_of<S>(found.largest) * std::fabs(scale) <= N::kLargest)) return Way::kAny;
    if constexpr (kShifts<S, N>) {
        const int32_t shift = shift_of<S, N>(scale), least = int32_t(found.least) + 1;
        if (is_power_of_two(scale) && std::min(least, least + shift) >= kLeastNormal<S>) return Way::kShift;
    }
    return Way::kInRange;
}

template <class S, class N>
HZ_INLINE void cast_chunk(const S* source, N* out, int64_t numel, float scale, Way way) {
    switch (way) {
        case Way::kAny:
            HZ_NO_OVERLAP
            for (int64_t i = 0; i < numel; ++i) out[i] = narrow_to<N>(widen(source[i]) * scale);
            break;
        case Way::kInRange:
            HZ_NO_OVERLAP
            for (int64_t i = 0; i < numel; ++i) out[i] = narrow_in_range<N>(widen(source[i]) * scale);
            break;
        case Way::kShift:
            if constexpr (kShifts<S, N>) {
                const auto shift = static_cast<uint16_t>(shift_of<S, N>(scale));
                HZ_NO_OVERLAP
                for (int64_t i = 0; i < numel; ++i) out[i] = narrow_by_shift<N>(source[i], shift);
            }
    }
}

// Returns the largest `ordered` of the sources. Nothing is written where N is nothing.
template <class S, class N>
HZ_INLINE int32_t cast(const void* sources, [[maybe_unused]] void* outs, int64_t numel, [[maybe_unused]] float scale) {
    const S* source = static_cast<const S*>(sources);
    int32_t largest = 0;
    for (int64_t start = 0; start < numel; start += kChunk) {
        const int64_t count = std::min(kChunk, numel - start);
        const auto found = extremes_of(source + start, count);
        if constexpr (!std::is_same_v<N, nothing>) {
            // The chunk after the next comes from memory while this one is cast: the two passes over a chunk leave
            // less for the processor's own look ahead, and this is a tenth of a cast.
            const char* const ahead = reinterpret_cast<const char*>(source + start + 2 * kChunk);
            for (int64_t at = 0; at < kChunk * int64_t(sizeof(S)); at += kLine) __builtin_prefetch(ahead + at);
            cast_chunk(source + start, static_cast<N*>(outs) + start, count, scale, way_for<S, N>(found, scale));
        }
        largest = std::max<int32_t>(largest, found.largest);
    }
    return largest;
}

template <class N, bool adds>
HZ_INLINE void uncast(const void* sources, float* out, int64_t numel, float inverse, float factor) {
    const N* source = static_cast<const N*>(sources);
    HZ_NO_OVERLAP
    for (int64_t i = 0; i < numel; ++i) {
        const float value = widen_from(source[i]) * inverse * factor;
        out[i] = adds ? out[i] + value : value;
    }
}

// The two loops at a level.
#define HZ_LOOPS(Level, TARGET)                                                                                \
    struct Level {                                                                                             \
        template <class S, class N>                                                                            \
        TARGET static int32_t cast(const void* source, void* out, int64_t numel, float scale) {                \
            return hz::cast<S, N>(source, out, numel, scale);                                                  \
        }                                                                                                      \
        template <class N, bool adds>                                                                          \
        TARGET static void uncast(const void* source, float* out, int64_t numel, float inverse, float factor) { \
            hz::uncast<N, adds>(source, out, numel, inverse, factor);                                          \
        }                                                                                                      \
    };
HZ_LOOPS(Default, )
HZ_LOOPS(V3, HZ_TARGET_V3)
HZ_LOOPS(V4, HZ_TARGET_V4)

using CastKernel = decltype(&Default::cast<float, e4m3>);
using UncastKernel = decltype(&Default::uncast<e4m3, false>);

template <class Level, class S>
CastKernel cast_from(int out_type) {
    switch (out_type) {
        case HZ_NONE: return Level::template cast<S, nothing>;
        case HZ_E4M3: return Level::template cast<S, e4m3>;
        case HZ_E5M2: return Level::template cast<S, e5m2>;
        case HZ_F16: return Level::template cast<S, half>;
        default: return nullptr;
    }
}

template <class Level>
CastKernel cast_kernel(int source_type, int out_type) {
    switch (source_type) {
        case HZ_F32: return cast_from<Level, float>(out_type);
        case HZ_BF16: return cast_from<Level, bf16>(out_type);
        case HZ_F16: return cast_from<Level, f16>(out_type);
        default: return nullptr;
    }
}

template <class Level>
UncastKernel uncast_kernel(int source_type, bool adds) {
    switch (source_type) {
        case HZ_E4M3: return adds ? Level::template uncast<e4m3, true> : Level::template uncast<e4m3, false>;
        case HZ_E5M2: return adds ? Level::template uncast<e5m2, true> : Level::template uncast<e5m2, false>;
        case HZ_F16: return adds ? Level::template uncast<half, true> : Level::template uncast<half, false>;
        default: return nullptr;
    }
}

// What `find` gives for the level, a type with the two loops.
template <class Find>
auto at_level(int level, Find find) {
#if defined(__x86_64__)
    if (level == HZ_SIMD_V4) return find(V4());
    if (level == HZ_SIMD_V3) return find(V3());
#endif
    return level == HZ_SIMD_DEFAULT ? find(Default()) : nullptr;
}

float float_of_ordered(int32_t bits, int type) {
    if (type == HZ_F32) return magnitude_of<float>(bits);
    return type == HZ_BF16 ? magnitude_of<bf16>(bits) : magnitude_of<f16>(bits);
}

struct Work {
    const hz_segments* segments;
    const char* source;
    char* out;  // null if nothing is written
    int64_t source_size, out_size;

    // Calls part(i, start, stop) for what segments have of the elements `at` to `end`, gap(start, stop) for the rest.
    template <class Part, class Gap>
    void walk(int64_t at, int64_t end, Part part, Gap gap) const {
        const auto* bounds = segments->bounds;
        const int64_t num = segments->num_segments;
        int64_t i = first_that_ends_after(at);
        while (at < end) {
            while (i < num && bounds[2 * i + 1] <= at) ++i;
            const bool inside = i < num && bounds[2 * i] <= at;
            const int64_t stop = std::min(end, i < num ? bounds[2 * i + inside] : end);
            inside ? part(i, at, stop) : gap(at, stop);
            at = stop;
        }
    }

    int64_t first_that_ends_after(int64_t at) const {
        int64_t low = 0, high = segments->num_segments;
        while (low < high) {
            const int64_t middle = low + (high - low) / 2;
            if (segments->bounds[2 * middle + 1] > at) high = middle;
            else low = middle + 1;
        }
        return low;
    }
};

struct Cast : Work {
    CastKernel kernel;
    StreamLines stream;  // null if results do not go past the caches
    std::vector<std::atomic<int32_t>> largest;

    void task(int64_t at, int64_t end) {
        walk(
            at, end,
            [&](int64_t i, int64_t start, int64_t stop) { raise(largest[i], cast_part(i, start, stop)); },
            [&](int64_t start, int64_t stop) {
                if (out) std::memset(out + start * out_size, 0, static_cast<size_t>((stop - start) * out_size));
            });
    }

    int32_t cast_part(int64_t i, int64_t start, int64_t stop) {
        const float scale = out ? segments->scales[i] : 1;
        const int64_t block = out ? kBlock / out_size : 0;
        int32_t most = 0;
        write_blocks(out, out_size, start, stop, block, stream, [&](int64_t from, int64_t to, char* target) {
            most = std::max(most, kernel(source + from * source_size, target, to - from, scale));
        });
        return most;
    }

    static void raise(std::atomic<int32_t>& largest, int32_t value) {
        int32_t before = largest.load(std::memory_order_relaxed);
        while (before < value && !largest.compare_exchange_weak(before, value, std::memory_order_relaxed)) {
        }
    }
};

struct Uncast : Work {
    UncastKernel kernel;
    float factor;

    void task(int64_t at, int64_t end) {
        walk(
            at, end,
            [&](int64_t i, int64_t start, int64_t stop) {
                float* const target = reinterpret_cast<float*>(out) + start;
                kernel(source + start * source_size, target, stop - start, 1.0f / segments->scales[i], factor);
            },
            [](int64_t, int64_t) {});
    }
};

template <class Job>
int run(Job& job, int64_t numel, int32_t threads) {
    struct Context {
        Job& job;
        int64_t numel;
    } context{job, numel};
    const auto task = [](void* pointer, int64_t index) {
        const Context& c = *static_cast<Context*>(pointer);
        c.job.task(index * kTask, std::min(c.numel, (index + 1) * kTask));
    };
    const int64_t worth = std::min<int64_t>(threads, numel / kMinPerThread + 1);
    return run_tasks(task, &context, (numel + kTask - 1) / kTask, static_cast<int>(worth));
}

}  // namespace
}  // namespace hz

int32_t hz_cast(const hz_segments* segments, const void* source, int32_t source_type, void* out, int32_t out_type,
                float* amaxes, int32_t threads, int32_t simd) {
    using namespace hz;
    const int level = simd_level(simd);
    const CastKernel kernel =
        at_level(level, [&](auto with) { return cast_kernel<decltype(with)>(source_type, out_type); });
    if (!kernel) return -1;
    const bool streams = out_type != HZ_NONE && segments->numel >= kStreamFrom;
    try {
        Cast job{{segments, static_cast<const char*>(source), static_cast<char*>(out), size_of(source_type),
                  size_of(out_type)},
                 kernel,
                 streams ? stream_lines(level) : nullptr,
                 std::vector<std::atomic<int32_t>>(static_cast<size_t>(segments->num_segments))};
        if (const int error = run(job, segments->numel, threads)) return error;
        for (int64_t i = 0; i < segments->num_segments; ++i) amaxes[i] = float_of_ordered(job.largest[i], source_type);
        return 0;
    } catch (const std::bad_alloc&) {
        return ENOMEM;
    }
}

int32_t hz_uncast(const hz_segments* segments, const void* source, int32_t source_type, float* out, float factor,
                  int32_t add, int32_t threads, int32_t simd) {
    using namespace hz;
    const int level = simd_level(simd);
    const UncastKernel kernel =
        at_level(level, [&](auto with) { return uncast_kernel<decltype(with)>(source_type, add); });
    if (!kernel) return -1;
    Uncast job{{segments, static_cast<const char*>(source), reinterpret_cast<char*>(out), size_of(source_type),
                sizeof(float)},
               kernel,
               factor};
    return run(job, segments->numel, threads);
}
