// What memory allows an fp32 Adam: the same streams, next to no arithmetic. For benchmarks only.
#include <cstdint>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "hz_api.h"
#include "pool.h"
#include "simd.h"

namespace hz {
namespace {

constexpr int64_t kTask = 32768;

struct Streams {
    float* a;
    float* b;
    float* c;
    const float* d;
    int64_t numel;
    bool streaming;
};

HZ_INLINE void add(float* __restrict a, float* __restrict b, float* __restrict c, const float* __restrict d,
                   int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
        const float x = d[i];
        a[i] += 1e-9f * x;
        b[i] += 1e-9f * x;
        c[i] += 1e-9f * x;
    }
}

void add_default(float* a, float* b, float* c, const float* d, int64_t n) { add(a, b, c, d, n); }
HZ_TARGET_V3 void add_v3(float* a, float* b, float* c, const float* d, int64_t n) { add(a, b, c, d, n); }
HZ_TARGET_V4 void add_v4(float* a, float* b, float* c, const float* d, int64_t n) { add(a, b, c, d, n); }

void add_streaming(float* a, float* b, float* c, const float* d, int64_t n) {
    int64_t i = 0;
#if defined(__SSE2__)
    const __m128 factor = _mm_set1_ps(1e-9f);
    for (; i + 16 <= n; i += 16) {
        __m128 sum[3][4];
        for (int k = 0; k < 4; ++k) {
            const __m128 x = _mm_mul_ps(factor, _mm_loadu_ps(d + i + 4 * k));
            sum[0][k] = _mm_add_ps(_mm_load_ps(a + i + 4 * k), x);
            sum[1][k] = _mm_add_ps(_mm_load_ps(b + i + 4 * k), x);
            sum[2][k] = _mm_add_ps(_mm_load_ps(c + i + 4 * k), x);
        }
        for (int k = 0; k < 4; ++k) _mm_stream_ps(a + i + 4 * k, sum[0][k]);
        for (int k = 0; k < 4; ++k) _mm_stream_ps(b + i + 4 * k, sum[1][k]);
        for (int k = 0; k < 4; ++k) _mm_stream_ps(c + i + 4 * k, sum[2][k]);
    }
    _mm_sfence();
#endif
    add(a + i, b + i, c + i, d + i, n - i);
}

void run_task(void* context, int64_t index) {
    const Streams& s = *static_cast<const Streams*>(context);
    const int64_t start = index * kTask;
    const int64_t n = start + kTask < s.numel ? kTask : s.numel - start;
    const int level = simd_level(HZ_SIMD_AUTO);
    auto loop = level == HZ_SIMD_V4 ? add_v4 : level == HZ_SIMD_V3 ? add_v3 : add_default;
    if (s.streaming) loop = add_streaming;
    loop(s.a + start, s.b + start, s.c + start, s.d + start, n);
}

}  // namespace
}  // namespace hz

int32_t hz_traffic(float* a, float* b, float* c, const float* d, int64_t numel, int32_t threads, int32_t streaming) {
    hz::Streams streams{a, b, c, d, numel, streaming != 0};
    return hz::run_tasks(hz::run_task, &streams, (numel + hz::kTask - 1) / hz::kTask, threads);
}
