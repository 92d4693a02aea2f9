// C interface of file access in the background. hf_zero/native/aio.py mirrors it by hand: a change here raises
// HZ_ABI_VERSION (hz_api.h).
//
// Handles are numbers that are looked up, so that a call after the close of a queue or file gives -EBADF and never
// touches freed memory. A queue belongs to the process that made it: in a forked child its threads do not exist, and
// every call on it returns -EOWNERDEAD.
#pragma once

#include <cstdint>

#include "hz_export.h"

enum hz_aio_engine : int32_t { HZ_AIO_AUTO = 0, HZ_AIO_URING = 1, HZ_AIO_THREADS = 2 };

// Failures beside the errno: the file ended before the bytes that were asked for, or took no more of them.
enum hz_aio_kind : int32_t { HZ_AIO_OK = 0, HZ_AIO_SYSTEM = 1, HZ_AIO_SHORT = 2 };

struct hz_aio_options {
    int64_t block_size;
    int32_t queue_depth;
    int32_t threads;
    int32_t single_submit;
    int32_t overlap_events;
    int32_t engine;
};

struct hz_aio_result {
    int32_t kind;
    int32_t error;    // errno, for HZ_AIO_SYSTEM
    int64_t offset;   // of the first byte that was not transferred
    int64_t nbytes;   // that were to be transferred from there by the failed operation
    int64_t arrived;  // bytes of the request before `offset`
    double ended_at;  // seconds of the monotonic clock, whose zero is that of Python's time.perf_counter
};

// Counters since the queue was made.
struct hz_aio_stats {
    int64_t submits;        // system calls that started operations
    int64_t operations;     // operations started, those that carried on after a short one included
    int64_t completions;
    int64_t refills;        // blocks begun when others of those under way together were through already
    int64_t max_in_flight;  // blocks under way at once
    int64_t bounced;        // operations through an aligned block of the queue's own
    int64_t buffered;       // operations through the page cache
};

struct hz_aio_file_info {
    int32_t fd;
    int32_t direct;     // O_DIRECT is used
    int64_t alignment;  // of offsets and lengths that go straight to the device, in bytes
    int64_t memory_alignment;
};

// Returns a queue, or -errno. `*engine` is what it uses; `*ring_error` is why that is not io_uring, or 0.
HZ_API int64_t hz_aio_create(const hz_aio_options* options, int32_t* engine, int32_t* ring_error);

// Waits for everything under way and ends the threads. hz_aio_submit gives -EBADF from then on; finished tickets can
// still be waited for. Returns 0 or -errno.
HZ_API int32_t hz_aio_stop(int64_t queue);

// hz_aio_stop, and the queue is gone. Returns 0 or -errno.
HZ_API int32_t hz_aio_destroy(int64_t queue);

// Returns a file, or -errno. A file without O_DIRECT support is opened without it (`info->direct`).
HZ_API int64_t hz_aio_open(const char* path, int32_t write, int32_t create, int32_t direct, hz_aio_file_info* info);
HZ_API int32_t hz_aio_file_info_of(int64_t file, hz_aio_file_info* info);

// Makes the file `nbytes` long, with all blocks on the disk allocated where the file system can do that. Returns 0 or
// -errno.
HZ_API int32_t hz_aio_preallocate(int64_t file, int64_t nbytes);

// The descriptors are closed when the last request on the file is done.
HZ_API int32_t hz_aio_close(int64_t file);

// Returns a ticket (> 0), or -errno. `memory` must stay valid until the request is done.
HZ_API int64_t hz_aio_submit(int64_t queue, int64_t file, int32_t write, void* memory, int64_t nbytes, int64_t offset);

// 0: done, `result` filled, and the ticket gone; -ETIMEDOUT: not done yet; -ENOENT: no such ticket.
HZ_API int32_t hz_aio_wait(int64_t queue, int64_t ticket, int32_t timeout_ms, hz_aio_result* result);

// 1 done, 0 not done; the ticket stays.
HZ_API int32_t hz_aio_done(int64_t queue, int64_t ticket);

HZ_API int32_t hz_aio_stats_of(int64_t queue, hz_aio_stats* stats);
