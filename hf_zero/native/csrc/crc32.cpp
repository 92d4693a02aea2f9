// CRC-32 with zlib's polynomial: by carry-less multiplication where the CPU has it, by tables elsewhere.
//
// Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction" (Intel, 2009): 64 bytes are
// folded into the next 64 by four multiplications, and what is left at the end is reduced by tables.
#include "hz_crc32.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "simd.h"

namespace hz {
namespace {

constexpr uint32_t kPolynomial = 0xEDB88320;  // bits reversed

using Tables = std::array<std::array<uint32_t, 256>, 8>;

constexpr Tables make_tables() {
    Tables tables{};
    for (uint32_t byte = 0; byte < 256; ++byte) {
        uint32_t value = byte;
        for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ (value & 1 ? kPolynomial : 0);
        tables[0][byte] = value;
    }
    for (uint32_t byte = 0; byte < 256; ++byte) {
        for (size_t i = 1; i < 8; ++i) {
            uint32_t before = tables[i - 1][byte];
            tables[i][byte] = (before >> 8) ^ tables[0][before & 0xff];
        }
    }
    return tables;
}

constexpr Tables kTables = make_tables();

// `state` is the complement of the checksum, as between the calls of the functions below.
uint32_t by_tables(uint32_t state, const unsigned char* from, int64_t nbytes) {
    for (; nbytes >= 8; from += 8, nbytes -= 8) {
        uint64_t word = 0;
        for (int i = 7; i >= 0; --i) word = word << 8 | from[i];  // one load on little-endian machines
        word ^= state;
        state = 0;
        for (size_t i = 0; i < 8; ++i) state ^= kTables[7 - i][(word >> (8 * i)) & 0xff];
    }
    for (; nbytes > 0; ++from, --nbytes) state = (state >> 8) ^ kTables[0][(state ^ *from) & 0xff];
    return state;
}

#if defined(__x86_64__)
#define HZ_TARGET_CLMUL __attribute__((target("pclmul,sse4.1")))

bool has_clmul() {
    static const bool has = [] {
        __builtin_cpu_init();
        return __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
    }();
    return has;
}

HZ_TARGET_CLMUL HZ_INLINE __m128i fold(__m128i value, __m128i factors, __m128i next) {
    __m128i low = _mm_clmulepi64_si128(value, factors, 0x00);
    __m128i high = _mm_clmulepi64_si128(value, factors, 0x11);
    return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

template <bool copies>
HZ_TARGET_CLMUL HZ_INLINE __m128i load(const unsigned char* from, unsigned char* to) {
    __m128i value = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    if (copies) _mm_storeu_si128(reinterpret_cast<__m128i*>(to), value);
    return value;
}

// At least 64 bytes; of them, and of `to`, what is a multiple of 16 is done, and the rest by the caller.
template <bool copies>
HZ_TARGET_CLMUL uint32_t by_clmul(uint32_t state, const unsigned char* from, int64_t nbytes, unsigned char* to) {
    // x^(8 * 64 + 32), x^(8 * 64 - 32), then the same for 16 bytes, modulo the polynomial, bits reversed.
    const __m128i over_64 = _mm_set_epi64x(0x1c6e41596, 0x154442bd4);
    const __m128i over_16 = _mm_set_epi64x(0xccaa009e, 0x1751997d0);
    __m128i lanes[4];
    for (int i = 0; i < 4; ++i) lanes[i] = load<copies>(from + 16 * i, to + (copies ? 16 * i : 0));
    lanes[0] = _mm_xor_si128(lanes[0], _mm_cvtsi32_si128(static_cast<int>(state)));
    int64_t done = 64;
    for (; done + 64 <= nbytes; done += 64) {
        for (int i = 0; i < 4; ++i) {
            int64_t at = done + 16 * i;
            lanes[i] = fold(lanes[i], over_64, load<copies>(from + at, to + (copies ? at : 0)));
        }
    }
    __m128i last = lanes[0];
    for (int i = 1; i < 4; ++i) last = fold(last, over_16, lanes[i]);
    for (; done + 16 <= nbytes; done += 16) last = fold(last, over_16, load<copies>(from + done, to + (copies ? done : 0)));
    // The 16 bytes that are left have the same remainder as all before: any way to their checksum will do.
    unsigned char rest[16];
    _mm_storeu_si128(reinterpret_cast<__m128i*>(rest), last);
    return by_tables(0, rest, 16);
}
#endif

uint32_t checksum(uint32_t state, const unsigned char* from, int64_t nbytes, unsigned char* to, int32_t simd) {
#if defined(__x86_64__)
    if (simd != HZ_SIMD_DEFAULT && nbytes >= 64 && has_clmul()) {
        int64_t whole = nbytes - nbytes % 16;
        state = to ? by_clmul<true>(state, from, whole, to) : by_clmul<false>(state, from, whole, nullptr);
        from += whole;
        to = to ? to + whole : nullptr;
        nbytes -= whole;
    }
#else
    (void)simd;
#endif
    if (to && nbytes > 0) std::memcpy(to, from, static_cast<size_t>(nbytes));
    return by_tables(state, from, nbytes);
}

}  // namespace
}  // namespace hz

HZ_API uint32_t hz_crc32(uint32_t crc, const void* from, int64_t nbytes, void* to, int32_t simd) {
    const auto* bytes = static_cast<const unsigned char*>(from);
    return ~hz::checksum(~crc, bytes, nbytes, static_cast<unsigned char*>(to), simd);
}
