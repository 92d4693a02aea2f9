// The library's own threads. See pool.cpp.
#pragma once

#include <cstdint>

namespace hz {

// Calls task(context, i) for every i in [0, num_tasks), on the calling thread and up to threads - 1 others, and
// returns when all calls have returned. Tasks start in order; which thread runs one is left open. Tasks must not throw
// and must not call run_tasks. Calls from several threads run one after another. Returns 0, or errno if a thread
// cannot be started (then no task has run).
int run_tasks(void (*task)(void* context, int64_t index), void* context, int64_t num_tasks, int threads);

}  // namespace hz
