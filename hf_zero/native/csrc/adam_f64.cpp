// Adam with master and moments in double: for exact comparisons and for models in double.
#include "adam_kernel.h"

namespace hz {

AdamKernel adam_kernel_f64(const AdamForm& form) {
    switch (form.grad_type) {
        case HZ_F32: return with_out<double, double, float>(form);
        case HZ_F64: return with_out<double, double, double>(form);
        case HZ_BF16: return with_out<double, double, bf16>(form);
        case HZ_F16: return with_out<double, double, f16>(form);
        default: return nullptr;
    }
}

}  // namespace hz
