// The Adam update of one contiguous range, and how its types and instruction sets are looked up. Used by the
// adam_*.cpp files, one per kind of state, so that they compile side by side.
//
// The order of operations is that of torch.optim.Adam and AdamW (single tensor), without fused multiply-adds, and with
// the square root multiplied by the reciprocal of its correction (two divisions per element would outlast the memory):
// results differ from torch's by the rounding of last bits only, and are the same bits at every level.
#pragma once

#include <cmath>
#include <cstdint>

#include "convert.h"
#include "hz_api.h"

namespace hz {

// Values that all elements of a span share, still in double: a kernel rounds them to the master's type, as torch does.
struct AdamConstants {
    double grad_scale;
    double decay;       // the parameter is multiplied by it: 1 - lr * weight_decay, or 1
    double l2;          // times the parameter is added to the gradient, where add_l2
    double weight1;     // 1 - beta1
    double beta2;
    double weight2;     // 1 - beta2
    double correction;  // sqrt(1 - beta2 ** step)
    double eps;
    double step_size;   // -lr / (1 - beta1 ** step)
    uint32_t seed;      // see [Note: Stochastic rounding]
    bool add_l2;
};

// Updates `numel` elements; `index` is that of the first one in its parameter, modulo 2 ** 32.
using AdamKernel = void (*)(const AdamConstants&, void* master, void* exp_avg, void* exp_avg_sq, const void* grad,
                            void* out, int64_t numel, uint32_t index);

struct AdamForm {  // what a kernel is chosen by
    int grad_type;
    int out_type;
    int level;
    // L2 decay, or beta1 of 0.5 or less. AdamW as it is mostly used has kernels of its own: on one thread the few
    // instructions saved are 4% of the time.
    bool general;
};

// By the kind of state. Null where the types do not go together.
AdamKernel adam_kernel_f32(const AdamForm& form);
AdamKernel adam_kernel_bf16(const AdamForm& form);
AdamKernel adam_kernel_f64(const AdamForm& form);

template <class T, class M, class G, class O, bool general>
HZ_INLINE void update(const AdamConstants& c, void* master, void* exp_avg, void* exp_avg_sq, const void* grads,
                      void* outs, int64_t numel, uint32_t index) {
    T* p = static_cast<T*>(master);
    M* m = static_cast<M*>(exp_avg);
    M* v = static_cast<M*>(exp_avg_sq);
    const G* g = static_cast<const G*>(grads);
    O* out = static_cast<O*>(outs);
    const T scale = static_cast<T>(c.grad_scale), decay = static_cast<T>(c.decay);
    [[maybe_unused]] const T l2 = static_cast<T>(c.l2);
    const T weight1 = static_cast<T>(c.weight1), beta2 = static_cast<T>(c.beta2);
    const T weight2 = static_cast<T>(c.weight2), correction = static_cast<T>(c.correction);
    const T eps = static_cast<T>(c.eps), step_size = static_cast<T>(c.step_size);
    const uint32_t seed = c.seed;
    // This is torch's lerp: it starts from the nearer end, so that weight 1 gives the gradient itself.
    const bool near = c.weight1 < 0.5;
    const T coefficient = general && !near ? weight1 - T(1) : weight1;
    using Bits = decltype(bits_of(T()));
    [[maybe_unused]] const Bits is_near = Bits(0) - Bits(near), has_l2 = Bits(0) - Bits(c.add_l2);
    HZ_NO_OVERLAP
    for (int64_t i = 0; i < numel; ++i) {
        T param = p[i], grad = static_cast<T>(widen(g[i])) * scale;
        T first = static_cast<T>(widen(m[i])), second = static_cast<T>(widen(v[i]));
        T base = first;
        if constexpr (general) {
            grad = float_of(choose(has_l2, bits_of(grad + l2 * param), bits_of(grad)));
            base = float_of(choose(is_near, bits_of(first), bits_of(grad)));
        }
        param *= decay;
        first = base + coefficient * (grad - first);
        second = second * beta2 + weight2 * grad * grad;
        const T denominator = std::sqrt(second) * correction + eps;
        param += step_size * first / denominator;
        p[i] = param;
        if constexpr (sizeof(M) == sizeof(bf16)) {
            const uint32_t random = mix((index + static_cast<uint32_t>(i)) * 0x9e3779b1u + seed);
            m[i] = round_randomly(first, random & 0xffffu);
            v[i] = round_randomly(second, random >> 16);
        } else {
            m[i] = first;
            v[i] = second;
        }
        if constexpr (sizeof(O) > 1) narrow(param, out[i]);
    }
}

#define HZ_ADAM_ARGUMENTS                                                                               \
    const AdamConstants &c, void *master, void *exp_avg, void *exp_avg_sq, const void *grad, void *out, \
        int64_t numel, uint32_t index
#define HZ_ADAM_PASS c, master, exp_avg, exp_avg_sq, grad, out, numel, index

template <class T, class M, class G, class O, bool general>
void adam_default(HZ_ADAM_ARGUMENTS) {
    update<T, M, G, O, general>(HZ_ADAM_PASS);
}

template <class T, class M, class G, class O, bool general>
HZ_TARGET_V3 void adam_v3(HZ_ADAM_ARGUMENTS) {
    update<T, M, G, O, general>(HZ_ADAM_PASS);
}

template <class T, class M, class G, class O, bool general>
HZ_TARGET_V4 void adam_v4(HZ_ADAM_ARGUMENTS) {
    update<T, M, G, O, general>(HZ_ADAM_PASS);
}

template <class T, class M, class G, class O, bool general>
AdamKernel at_level(int level) {
#if defined(__x86_64__)
    if (level == HZ_SIMD_V4) return adam_v4<T, M, G, O, general>;
    if (level == HZ_SIMD_V3) return adam_v3<T, M, G, O, general>;
#endif
    return level == HZ_SIMD_DEFAULT ? adam_default<T, M, G, O, general> : nullptr;
}

template <class T, class M, class G, class O>
AdamKernel for_form(const AdamForm& form) {
    // Doubles are for comparisons: one kind of kernel is enough.
    if (form.general || sizeof(T) == sizeof(double)) return at_level<T, M, G, O, true>(form.level);
    return at_level<T, M, G, O, sizeof(T) == sizeof(double)>(form.level);
}

template <class T, class M, class G>
AdamKernel with_out(const AdamForm& form) {
    switch (form.out_type) {
        case HZ_NONE: return for_form<T, M, G, nothing>(form);
        case HZ_F32: return for_form<T, M, G, float>(form);
        case HZ_F64: return for_form<T, M, G, double>(form);
        case HZ_BF16: return for_form<T, M, G, bf16>(form);
        case HZ_F16: return for_form<T, M, G, f16>(form);
        default: return nullptr;
    }
}

}  // namespace hz
