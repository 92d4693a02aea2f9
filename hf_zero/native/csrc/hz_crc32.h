// C interface of checksums. hf_zero/native/checksum.py mirrors it by hand: a change here raises HZ_ABI_VERSION
// (hz_api.h).
#pragma once

#include <cstdint>

#include "hz_export.h"

// zlib's CRC-32 of `nbytes` at `from`, continued from `crc` (0 at the start). Where `to` is not null, the bytes are
// copied there in the same pass; the two ranges do not overlap. `simd` is an hz_simd: the result is the same at every
// level. A level that this CPU lacks is taken for HZ_SIMD_DEFAULT.
HZ_API uint32_t hz_crc32(uint32_t crc, const void* from, int64_t nbytes, void* to, int32_t simd);
