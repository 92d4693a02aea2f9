// C interface of the library's general part, of the Adam update, of scaled casts and of 8-bit messages.
// hf_zero/native/library.py, adam.py, float8.py and int8_blocks.py mirror it by hand: every change here raises
// HZ_ABI_VERSION, and the same number stands in library.py.
#pragma once

#include <cstdint>

#include "hz_export.h"

#define HZ_ABI_VERSION 7

// Element types; hf_zero/native/{adam,float8,int8_blocks}.py have the same numbers.
enum hz_dtype : int32_t { HZ_NONE = 0, HZ_F32 = 1, HZ_F64 = 2, HZ_BF16 = 3, HZ_F16 = 4, HZ_E4M3 = 5, HZ_E5M2 = 6 };

// Instruction sets; AUTO takes the best that the CPU has. Results are the same bits at every level.
enum hz_simd : int32_t { HZ_SIMD_AUTO = -1, HZ_SIMD_DEFAULT = 0, HZ_SIMD_V3 = 1, HZ_SIMD_V4 = 2 };

// A contiguous range of elements that share hyper-parameters; see AdamSpan in adam.py.
struct hz_adam_span {
    int64_t start;
    int64_t numel;
    int64_t grad_start;
    int64_t out_start;
    int64_t index;
    int64_t step;
    double lr;
    double beta1;
    double beta2;
    double eps;
    double weight_decay;
    int32_t decoupled;
    int32_t bias_correction;
};

// Spans over one set of tensors. master is F32 or F64; moments are of its type, or BF16 with an F32 master.
struct hz_adam_batch {
    void* master;
    void* exp_avg;
    void* exp_avg_sq;
    const void* grad;
    void* out;  // the updated parameter rounded to out_type, or null with HZ_NONE
    int64_t state_numel;  // elements behind master, exp_avg and exp_avg_sq
    int64_t grad_numel;
    int64_t out_numel;
    const hz_adam_span* spans;
    int64_t num_spans;
    double grad_scale;  // multiplies the gradient, in the master's precision
    int32_t master_type;
    int32_t moment_type;
    int32_t grad_type;
    int32_t out_type;
};

HZ_API int32_t hz_abi_version(void);

// The best level that this CPU has.
HZ_API int32_t hz_simd_level(void);

// One Adam or AdamW update of all spans of all batches, on up to `threads` threads (fewer where the work is small).
// Returns 0; or -1 (types or span out of bounds, nothing was changed); or errno of what failed (nothing was changed).
HZ_API int32_t hz_adam_step(const hz_adam_batch* batches, int64_t num_batches, int32_t threads, int32_t simd);

// Ranges of a 1-D memory of `numel` elements, in ascending order, each with a scale.
struct hz_segments {
    const int64_t* bounds;  // start and end of each
    const float* scales;
    int64_t num_segments;
    int64_t numel;
};

// Writes source * scale, rounded to out_type, and 0 outside of the segments; the largest magnitude of each segment's
// source goes to `amaxes`. With HZ_NONE as out_type only that is done. source_type is F32, BF16 or F16, out_type E4M3,
// E5M2 or F16. Returns 0; or -1 (other types); or errno of what failed (nothing was written).
HZ_API int32_t hz_cast(const hz_segments* segments, const void* source, int32_t source_type, void* out,
                       int32_t out_type, float* amaxes, int32_t threads, int32_t simd);

// Writes source * (1 / scale) * factor, or adds it to `out`, within the segments. Returns as hz_cast does.
HZ_API int32_t hz_uncast(const hz_segments* segments, const void* source, int32_t source_type, float* out,
                         float factor, int32_t add, int32_t threads, int32_t simd);

// Rounds values at random to the 11 binary digits of fp16; `first` is the place of the first one, on which, with the
// seed, the random numbers depend. Returns 0; or -1 (no such level); or errno of what failed (nothing was written).
HZ_API int32_t hz_round_fp16(float* values, int64_t numel, int64_t first, uint32_t seed, int32_t threads,
                             int32_t simd);

// Makes the message of `numel` values of any floating type: a block's scale is fp32. Returns 0; or -1 (another type, or
// no such level); or errno of what failed (nothing was written).
HZ_API int32_t hz_quantize(const void* values, int32_t type, int64_t numel, void* message, int32_t threads,
                           int32_t simd);

// Adds up in fp32, in their order, what messages hold that follow each other in memory. Returns as hz_quantize does.
HZ_API int32_t hz_sum_messages(const void* messages, int64_t num_messages, void* sum, int32_t type, int64_t numel,
                               int32_t threads, int32_t simd);
