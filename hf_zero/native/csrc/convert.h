// Conversions between float and the 16-bit types, by integer arithmetic that every instruction set vectorises.
//
// Exact: round to nearest even, subnormals, infinities. The same bits at every level, which the hardware's own
// instructions would not promise for NaN.
#pragma once

#include <cstdint>
#include <cstring>

#include "hz_api.h"
#include "simd.h"

namespace hz {

// Bytes of an element of a hz_dtype; 0 of none.
inline int64_t size_of(int type) {
    switch (type) {
        case HZ_F64: return 8;
        case HZ_F32: return 4;
        case HZ_BF16:
        case HZ_F16: return 2;
        case HZ_E4M3:
        case HZ_E5M2: return 1;
        default: return 0;
    }
}

struct bf16 {
    uint16_t bits;
};
struct f16 {
    uint16_t bits;
};
struct nothing {};  // the type of `out` where there is none

HZ_INLINE uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

HZ_INLINE float float_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

HZ_INLINE uint64_t bits_of(double value) {
    uint64_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

HZ_INLINE double float_of(uint64_t bits) {
    double value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// `then` where the mask is all ones, `otherwise` where it is zero. Masks and no `?:`, here and below: compilers make
// branches of that, or mix the widths of masks, and then the loop is not vectorised.
template <class Bits>
HZ_INLINE Bits choose(Bits mask, Bits then, Bits otherwise) {
    return otherwise ^ ((then ^ otherwise) & mask);
}

HZ_INLINE uint32_t mask_of(bool condition) { return 0u - static_cast<uint32_t>(condition); }

HZ_INLINE float widen(float value) { return value; }
HZ_INLINE double widen(double value) { return value; }
HZ_INLINE float widen(bf16 value) { return float_of(static_cast<uint32_t>(value.bits) << 16); }

HZ_INLINE float widen(f16 value) {
    const uint32_t kExponent = 0x7c00u << 13;
    const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
    const uint32_t magnitude = static_cast<uint32_t>(value.bits & 0x7fffu) << 13;
    const uint32_t exponent = magnitude & kExponent;
    const uint32_t normal = magnitude + (112u << 23);
    const uint32_t special = magnitude + (224u << 23);  // infinity and NaN
    // A subnormal: make it a normal number by an implicit one in front, and subtract that one.
    const uint32_t subnormal = bits_of(float_of(magnitude + (113u << 23)) - float_of(113u << 23));
    const uint32_t result = choose(mask_of(exponent == kExponent), special, normal);
    return float_of(sign | choose(mask_of(exponent == 0), subnormal, result));
}

HZ_INLINE void narrow(float value, float& out) { out = value; }
HZ_INLINE void narrow(float value, double& out) { out = value; }
HZ_INLINE void narrow(double value, double& out) { out = value; }

HZ_INLINE void narrow(float value, bf16& out) {
    const uint32_t bits = bits_of(value);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    out.bits = static_cast<uint16_t>(choose(mask_of((bits & 0x7fffffffu) > 0x7f800000u), 0x7fc0u, rounded));
}

HZ_INLINE void narrow(float value, f16& out) {
    const uint32_t bits = bits_of(value);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t magnitude = bits & 0x7fffffffu;
    const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    // Adding 0.5 puts the last bit of a subnormal half at the last bit of the sum: the addition does the rounding.
    const uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
    uint32_t result = choose(mask_of(magnitude < (113u << 23)), subnormal, normal);
    // 65536 and above; what is rounded up to it comes out of `normal` as infinity.
    result = choose(mask_of(magnitude >= (143u << 23)), 0x7c00u, result);
    result = choose(mask_of(magnitude > 0x7f800000u), 0x7e00u, result);
    out.bits = static_cast<uint16_t>(sign | result);
}

// Through float, as torch does: a double that lies just beside a tie may be rounded twice.
HZ_INLINE void narrow(double value, float& out) { out = static_cast<float>(value); }
HZ_INLINE void narrow(double value, bf16& out) { narrow(static_cast<float>(value), out); }
HZ_INLINE void narrow(double value, f16& out) { narrow(static_cast<float>(value), out); }

// [Note: Stochastic rounding] With beta2 = 0.999 an update changes the second moment by a thousandth, and bf16 has
// eight bits: rounding to nearest would drop every such change, and the moment would stand still. Adding 16 random
// bits below the kept ones before truncating is right on average. The bits are a hash of (index in the parameter,
// step), so they do not depend on how the work is cut or on who does it; one hash gives both moments their half.
HZ_INLINE uint32_t mix(uint32_t value) {
    value = (value ^ (value >> 16)) * 0x85ebca6bu;
    value = (value ^ (value >> 13)) * 0xc2b2ae35u;
    return value ^ (value >> 16);
}

HZ_INLINE bf16 round_randomly(float value, uint32_t random16) {
    const uint32_t bits = bits_of(value);
    const uint32_t rounded = (bits + random16) >> 16;  // infinity stays: the bits below its last one are zero
    return bf16{static_cast<uint16_t>(choose(mask_of((bits & 0x7fffffffu) > 0x7f800000u), 0x7fc0u, rounded))};
}

}  // namespace hz
