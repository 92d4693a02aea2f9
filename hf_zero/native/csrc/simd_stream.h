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

// Calls write(at, stop, target) for the elements `start` to `end` of `out`, which have `size` bytes each: once, with
// their place as the target; or, with `stream`, for `block` elements at a time, with a buffer that is then copied past
// the caches. `block` elements are whole lines, and 2 KiB at most.
template <class Write>
HZ_INLINE void write_blocks(char* out, int64_t size, int64_t start, int64_t end, int64_t block, StreamLines stream,
                            Write write) {
    alignas(kLine) char buffer[2048];
    int64_t stop = end;
    if (stream) {  // the first block ends where a line of `out` does, so that all others start at one
        const int64_t off_line = static_cast<int64_t>(reinterpret_cast<uintptr_t>(out + start * size) % kLine);
        stop = start + (off_line ? (kLine - off_line) / size : block);
    }
    for (int64_t at = start; at < end; at = stop, stop += block) {
        if (stop > end) stop = end;
        char* const target = out ? out + at * size : nullptr;
        const int64_t nbytes = (stop - at) * size;
        const bool lines = stream && reinterpret_cast<uintptr_t>(target) % kLine == 0 && nbytes % kLine == 0;
        write(at, stop, lines ? buffer : target);
        if (lines) stream(target, buffer, nbytes / kLine);
    }
    if (stream) stream_fence();
}

}  // namespace hz
