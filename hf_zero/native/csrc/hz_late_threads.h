// C interface of what happens to threads after Python's end. hf_zero/native/late_threads.py mirrors it by hand: a change
// here raises HZ_ABI_VERSION (hz_api.h).
#pragma once

#include "hz_export.h"

// From now on a thread that Python ends inside of C++ sleeps instead of aborting the process, so that the calling
// thread ends it with its own status. To be called by the thread that ends Python, as the last that Python does.
HZ_API void hz_let_late_threads_sleep(void);
