// Copies of what is not read again soon: past the caches, so that no line is read only to be overwritten.
#include "hz_copy.h"

#include <cstring>

#include "simd.h"
#include "simd_stream.h"

namespace hz {
namespace {

void copy(char* to, const char* from, int64_t nbytes, StreamLines stream) {
    int64_t head = static_cast<int64_t>(-reinterpret_cast<uintptr_t>(to) % kLine);
    if (head > nbytes) head = nbytes;
    const int64_t lines = (nbytes - head) / kLine, tail = head + lines * kLine;
    std::memcpy(to, from, static_cast<size_t>(head));
    stream(to + head, from + head, lines);
    std::memcpy(to + tail, from + tail, static_cast<size_t>(nbytes - tail));
    stream_fence();
}

}  // namespace
}  // namespace hz

HZ_API void hz_copy(void* to, const void* from, int64_t nbytes, int32_t simd) {
    if (nbytes <= 0) return;
    const int level = hz::simd_level(simd);
    hz::copy(static_cast<char*>(to), static_cast<const char*>(from), nbytes,
             hz::stream_lines(level < 0 ? HZ_SIMD_DEFAULT : level));
}
