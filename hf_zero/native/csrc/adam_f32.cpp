// Adam with master and moments in float.
#include "adam_kernel.h"

namespace hz {

AdamKernel adam_kernel_f32(const AdamForm& form) {
    switch (form.grad_type) {
        case HZ_F32: return with_out<float, float, float>(form);
        case HZ_BF16: return with_out<float, float, bf16>(form);
        case HZ_F16: return with_out<float, float, f16>(form);
        default: return nullptr;
    }
}

}  // namespace hz
