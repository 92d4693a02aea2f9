// C interface of copies. hf_zero/native/host_copy.py mirrors it by hand: a change here raises HZ_ABI_VERSION (hz_api.h).
#pragma once

#include <cstdint>

#include "hz_export.h"

// Copies `nbytes` that nobody reads again soon; the two ranges do not overlap. `simd` is an hz_simd; a level that this
// CPU lacks is taken for HZ_SIMD_DEFAULT.
HZ_API void hz_copy(void* to, const void* from, int64_t nbytes, int32_t simd);
