// Writes past the caches, for results that are not read again soon: a plain write to memory reads the line first.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "simd.h"

namespace hz {

constexpr int64_t kLine = 64;

// Copies whole lines; `to` is at the start of one. The caller owes a stream_fence before it tells others.
using StreamLines = void (*)(char* to, const char* from, int64_t num_lines);

#if defined(__x86_64__)
inline void stream_lines_default(char* to, const char* from, int64_t num_lines) {
    for (int64_t i = 0; i < num_lines * kLine; i += 16) {
        const __m128i part = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
        _mm_stream_si128(reinterpret_cast<__m128i*>(to + i), part);
    }
}

inline HZ_TARGET_V4 void stream_lines_v4(char* to, const char* from, int64_t num_lines) {
    for (int64_t i = 0; i < num_lines * kLine; i += kLine) {
        _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i), _mm512_loadu_si512(from + i));
    }
}

inline StreamLines stream_lines(int level) { return level == HZ_SIMD_V4 ? stream_lines_v4 : stream_lines_default; }

inline void stream_fence() { _mm_sfence(); }
#else
inline void stream_lines_plain(char* to, const char* from, int64_t num_lines) {
    std::memcpy(to, from, static_cast<size_t>(num_lines * kLine));
}

inline StreamLines stream_lines(int) { return stream_lines_plain; }

inline void stream_fence() {}
#endif

}  // namespace hz
