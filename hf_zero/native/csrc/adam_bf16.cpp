// Adam with a float master and bfloat16 moments.
#include "adam_kernel.h"

namespace hz {

AdamKernel adam_kernel_bf16(const AdamForm& form) {
    switch (form.grad_type) {
        case HZ_F32: return with_out<float, bf16, float>(form);
        case HZ_BF16: return with_out<float, bf16, bf16>(form);
        case HZ_F16: return with_out<float, bf16, f16>(form);
        default: return nullptr;
    }
}

}  // namespace hz
