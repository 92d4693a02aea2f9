// Cuts an Adam update into pieces of equal work, checks it, and runs it on the pool.
#include <cerrno>
#include <cmath>
#include <cstdint>
#include <new>
#include <type_traits>
#include <vector>

#include "adam_kernel.h"
#include "hz_api.h"
#include "pool.h"
#include "simd_stream.h"

namespace hz {
namespace {

// Small enough to share out evenly, large enough that a claim costs nothing; 128 KiB of each float stream.
constexpr int64_t kTask = 32768;
// Below it a second thread costs more than it brings.
constexpr int64_t kMinPerThread = 16384;
// From here on the written parameters would not stay in a cache until somebody reads them.
constexpr int64_t kStreamFrom = 1 << 20;
// Elements of the buffer that streamed parameters go through. Small, so that the copy hides in the update around it:
// measured 6% faster than 1024.
constexpr int64_t kBlock = 256;

template <class P>
auto advance(P* pointer, int64_t elements, int type) {
    using Byte = std::conditional_t<std::is_const_v<P>, const char, char>;
    return static_cast<Byte*>(pointer) + elements * size_of(type);
}

struct Part {  // one span with its batch and its kernel
    const hz_adam_batch* batch;
    const hz_adam_span* span;
    AdamKernel kernel;
    int64_t first;  // elements of all parts before it
};

struct Update {
    std::vector<Part> parts;
    int64_t numel = 0;
    StreamLines stream = nullptr;  // where the update is large
};

AdamKernel find_kernel(const hz_adam_batch& batch, int level, bool general) {
    const AdamForm form{batch.grad_type, batch.out_type, level, general};
    if (batch.master_type == HZ_F64) return batch.moment_type == HZ_F64 ? adam_kernel_f64(form) : nullptr;
    if (batch.master_type != HZ_F32) return nullptr;
    if (batch.moment_type == HZ_F32) return adam_kernel_f32(form);
    return batch.moment_type == HZ_BF16 ? adam_kernel_bf16(form) : nullptr;
}

bool inside(int64_t start, int64_t numel, int64_t limit) { return start >= 0 && start <= limit - numel; }

bool fits(const hz_adam_span& span, const hz_adam_batch& batch) {
    return span.numel >= 0 && span.step >= 1 && span.index >= 0 && inside(span.start, span.numel, batch.state_numel) &&
           inside(span.grad_start, span.numel, batch.grad_numel) &&
           (batch.out_type == HZ_NONE || inside(span.out_start, span.numel, batch.out_numel));
}

bool adds_l2(const hz_adam_span& span) { return span.weight_decay != 0 && !span.decoupled; }

bool is_general(const hz_adam_span& span) { return adds_l2(span) || !(1 - span.beta1 < 0.5); }

// False if a batch is wrong; nothing has been changed then.
bool plan(const hz_adam_batch* batches, int64_t num_batches, int level, Update& update) {
    for (int64_t b = 0; b < num_batches; ++b) {
        const hz_adam_batch& batch = batches[b];
        const AdamKernel plain = find_kernel(batch, level, false), general = find_kernel(batch, level, true);
        if (!plain) return false;
        for (int64_t s = 0; s < batch.num_spans; ++s) {
            const hz_adam_span& span = batch.spans[s];
            if (!fits(span, batch)) return false;
            if (span.numel == 0) continue;
            update.parts.push_back({&batch, &span, is_general(span) ? general : plain, update.numel});
            update.numel += span.numel;
        }
    }
    if (update.numel >= kStreamFrom) update.stream = stream_lines(level);
    return true;
}

AdamConstants constants_of(const hz_adam_span& span, double grad_scale) {
    AdamConstants c{};
    const double step = static_cast<double>(span.step);
    const double correction1 = span.bias_correction ? 1 - std::pow(span.beta1, step) : 1;
    const double correction2 = span.bias_correction ? 1 - std::pow(span.beta2, step) : 1;
    c.grad_scale = grad_scale;
    // Rounded to the master's type by the kernel, as torch does. In float, 1 - lr * weight_decay has steps of 6e-8:
    // with lr 1e-5 and weight_decay 0.01 the decay that takes place is 19% off, and with lr 1e-6 there is none. Parity
    // first.
    c.decay = span.decoupled ? 1 - span.lr * span.weight_decay : 1;
    c.l2 = span.weight_decay;
    c.add_l2 = adds_l2(span);
    c.weight1 = 1 - span.beta1;
    c.beta2 = span.beta2;
    c.weight2 = 1 - span.beta2;
    c.correction = 1 / std::sqrt(correction2);
    c.eps = span.eps;
    c.step_size = -(span.lr / correction1);
    c.seed = mix(static_cast<uint32_t>(span.step) * 0x85ebca77u + 0x165667b1u);
    return c;
}

// Elements `start` to `start + numel` of a part. With `stream`, the rounded parameters go past the caches.
void update_part(const Part& part, int64_t start, int64_t numel, StreamLines stream) {
    const hz_adam_batch& batch = *part.batch;
    const hz_adam_span& span = *part.span;
    const AdamConstants constants = constants_of(span, batch.grad_scale);
    char* const out = batch.out_type ? advance(batch.out, span.out_start, batch.out_type) : nullptr;
    write_blocks(out, size_of(batch.out_type), start, start + numel, kBlock, stream,
                 [&](int64_t at, int64_t stop, char* target) {
                     part.kernel(constants, advance(batch.master, span.start + at, batch.master_type),
                                 advance(batch.exp_avg, span.start + at, batch.moment_type),
                                 advance(batch.exp_avg_sq, span.start + at, batch.moment_type),
                                 advance(batch.grad, span.grad_start + at, batch.grad_type), target, stop - at,
                                 static_cast<uint32_t>(span.index + at));
                 });
}

// The part that holds element `at` of the update.
size_t find_part(const std::vector<Part>& parts, int64_t at) {
    size_t low = 0, high = parts.size();
    while (high - low > 1) {
        size_t middle = low + (high - low) / 2;
        (parts[middle].first <= at ? low : high) = middle;
    }
    return low;
}

void run_task(void* context, int64_t index) {
    const Update& update = *static_cast<const Update*>(context);
    int64_t at = index * kTask;
    const int64_t end = at + kTask < update.numel ? at + kTask : update.numel;
    for (size_t i = find_part(update.parts, at); at < end; ++i) {
        const Part& part = update.parts[i];
        const int64_t part_end = part.first + part.span->numel;
        const int64_t stop = part_end < end ? part_end : end;
        update_part(part, at - part.first, stop - at, part.batch->out_type ? update.stream : nullptr);
        at = stop;
    }
}

}  // namespace
}  // namespace hz

int32_t hz_adam_step(const hz_adam_batch* batches, int64_t num_batches, int32_t threads, int32_t simd) {
    const int level = hz::simd_level(simd);
    if (level < 0) return -1;
    try {
        hz::Update update;
        if (!hz::plan(batches, num_batches, level, update)) return -1;
        const int64_t worth = update.numel / hz::kMinPerThread + 1;
        const int64_t num_tasks = (update.numel + hz::kTask - 1) / hz::kTask;
        return hz::run_tasks(hz::run_task, &update, num_tasks, static_cast<int>(threads < worth ? threads : worth));
    } catch (const std::bad_alloc&) {
        return ENOMEM;
    }
}
