// Conversions between float and the narrow types that a cast with a scale writes: two of 8 bits, and half. By integer
// arithmetic and one addition, which every instruction set vectorises, with the same bits at every level.
//
// To narrow is exact: round to nearest even, once; subnormals. Finite numbers saturate. Infinities and NaN stay what
// they are, except that e4m3fn has NaN for both, and all NaN get the same bits.
#pragma once

#include <cstdint>
#include <type_traits>

#include "convert.h"
#include "simd.h"

namespace hz {

struct e4m3 {
    using Bits = uint8_t;
    static constexpr uint32_t kMantissa = 3;     // bits
    static constexpr uint32_t kLeast = 127 - 6;  // exponent of the least normal number, biased as in a float
    static constexpr float kLargest = 448;
    static constexpr uint32_t kInf = 0x7f, kNan = 0x7f;
    Bits bits;
};

struct e5m2 {
    using Bits = uint8_t;
    static constexpr uint32_t kMantissa = 2;
    static constexpr uint32_t kLeast = 127 - 14;
    static constexpr float kLargest = 57344;
    static constexpr uint32_t kInf = 0x7c, kNan = 0x7f;
    Bits bits;
};

struct half {
    using Bits = uint16_t;
    static constexpr uint32_t kMantissa = 10;
    static constexpr uint32_t kLeast = 127 - 14;
    static constexpr float kLargest = 65504;
    static constexpr uint32_t kInf = 0x7c00, kNan = 0x7e00;
    Bits bits;
};

constexpr uint32_t kFloatSign = 0x80000000u, kFloatInf = 0x7f800000u, kFloatNan = 0x7fc00000u;

template <class N>
constexpr bool kHasInf = N::kInf != N::kNan;

// From the sign of a narrow number up to that of a float.
template <class N>
constexpr uint32_t kUp = 32 - 8 * sizeof(N);

// Mantissa bits that only the float has.
template <class N>
constexpr uint32_t kDropped = 23 - N::kMantissa;

// Numbers of 31 bits are compared as signed ones: AVX2 and older sets have no other comparison.
HZ_INLINE uint32_t smaller(uint32_t a, uint32_t b) { return static_cast<int32_t>(a) < static_cast<int32_t>(b) ? a : b; }
HZ_INLINE uint32_t larger(uint32_t a, uint32_t b) { return static_cast<int32_t>(a) > static_cast<int32_t>(b) ? a : b; }

// The code, at the upper end of the word, of a number whose magnitude is at most kLargest.
template <class N>
HZ_INLINE uint32_t code_in_range(float value) {
    constexpr uint32_t least = N::kLeast << 23;
    const uint32_t bits = bits_of(value), sign = bits & kFloatSign;
    const uint32_t exponent = larger(bits & kFloatInf, least);
    // The last bit of this power of two is worth one step of the narrow type at `value`: the sum is rounded to steps,
    // and their number stands at its end. A code is that number plus (exponent - kLeast) << kMantissa; the constant
    // part of this, which is even and so leaves ties alone, is in the power from the start.
    constexpr uint32_t constant = (0u - (N::kLeast << N::kMantissa)) << kUp<N> >> kUp<N>;
    const uint32_t power = (exponent + (kDropped<N> << 23) + constant) | sign;
    const uint32_t steps = bits_of(value + float_of(power));
    // At the upper end, where the sign is: a shift as the last operation keeps compilers from doing all of this once
    // more on bytes.
    return ((steps << kUp<N>) + (exponent << (kUp<N> - kDropped<N>))) | sign;
}

template <class N>
HZ_INLINE N narrow_in_range(float value) {
    return N{static_cast<typename N::Bits>(code_in_range<N>(value) >> kUp<N>)};
}

template <class N>
HZ_INLINE N narrow_to(float value) {
    const uint32_t bits = bits_of(value), magnitude = bits & ~kFloatSign, sign = bits & kFloatSign;
    uint32_t code = code_in_range<N>(float_of(smaller(magnitude, bits_of(N::kLargest)) | sign));
    if constexpr (kHasInf<N>) code = magnitude == kFloatInf ? N::kInf << kUp<N> | sign : code;
    const bool no_number = kHasInf<N> ? magnitude > kFloatInf : magnitude >= kFloatInf;
    code = no_number ? N::kNan << kUp<N> : code;
    return N{static_cast<typename N::Bits>(code >> kUp<N>)};
}

// Whether `narrow_by_shift` is for these types.
template <class S, class N>
constexpr bool kShifts = sizeof(S) == 2 && sizeof(N) == 1;

// The least number of a 16-bit type that is not subnormal, and so one step of its exponent.
template <class S>
constexpr int32_t kLeastNormal = 1 << 7;
template <>
constexpr int32_t kLeastNormal<f16> = 1 << 10;

HZ_INLINE bool is_power_of_two(float value) {
    const uint32_t bits = bits_of(value);
    return (bits & ~kFloatInf) == 0 && bits != 0 && bits != kFloatInf;
}

// The steps from the exponent of an S to that of N, after a product with a power of two.
template <class S, class N>
HZ_INLINE int32_t shift_of(float scale) {
    constexpr int32_t bias = std::is_same_v<S, bf16> ? 127 : 15;
    const int32_t power = static_cast<int32_t>(bits_of(scale) >> 23) - 127;
    return (power + (128 - int32_t(N::kLeast)) - bias) * kLeastNormal<S>;
}

// The same as narrow_in_range(widen(value) * scale) where `value` is zero or a normal number and the result is too.
// All of it is done on 16 bits, of which a vector has twice as many as of floats.
template <class N, class S>
HZ_INLINE N narrow_by_shift(S value, uint16_t shift) {
    constexpr int32_t step = kLeastNormal<S> >> N::kMantissa;  // of the narrow type
    const uint16_t magnitude = value.bits & 0x7fff, sign = value.bits & 0x8000;
    const uint16_t moved = static_cast<uint16_t>(magnitude + shift);
    const uint16_t is_even = (moved & step) == 0;
    const uint16_t rounded = static_cast<uint16_t>(moved + step / 2 - is_even);
    // At the upper end, for the reason that code_in_range gives.
    const uint16_t code = static_cast<uint16_t>(rounded * (256 / step));
    const uint16_t signed_code = (magnitude ? code : uint16_t(0)) | sign;
    return N{static_cast<uint8_t>(signed_code >> 8)};
}

template <class N>
HZ_INLINE float widen_from(N value) {
    constexpr uint32_t least = N::kLeast << 23, one_exponent = 1u << 23;
    const uint32_t bits = static_cast<uint32_t>(value.bits) << kUp<N>;
    const uint32_t code = bits & ~kFloatSign, magnitude = code >> (kUp<N> - kDropped<N>);
    const uint32_t normal = magnitude + (least - one_exponent);
    // A subnormal: make it a normal number by an implicit one in front, and subtract that one.
    const uint32_t subnormal = bits_of(float_of(magnitude + least) - float_of(least));
    uint32_t result = choose(mask_of(magnitude < one_exponent), subnormal, normal);
    if constexpr (kHasInf<N>) result = choose(mask_of(code == N::kInf << kUp<N>), kFloatInf, result);
    const bool no_number = kHasInf<N> ? code > N::kInf << kUp<N> : code == N::kNan << kUp<N>;
    return float_of((bits & kFloatSign) | choose(mask_of(no_number), kFloatNan, result));
}

}  // namespace hz
