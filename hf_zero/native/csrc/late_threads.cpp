// CPython before 3.14 ends a thread that asks for its lock after Python's end by pthread_exit. Where there is C++ on the
// stack, unwinding meets a function that must not throw, and std::terminate aborts the process. From 3.14 on such a
// thread sleeps; here it does too.
#include "hz_late_threads.h"

#include <pthread.h>
#include <unistd.h>

#include <cstdlib>
#include <exception>

namespace hz {
namespace {

// A thread may hold a lock that the end of the process needs: then it aborts after all, and does not hang.
constexpr unsigned kSleepSeconds = 10;

pthread_t ending_thread;
std::terminate_handler handler_before = nullptr;

[[noreturn]] void on_terminate() {
    // An error of C++ has an exception; a thread that is ended has none.
    if (!pthread_equal(pthread_self(), ending_thread) && !std::current_exception()) sleep(kSleepSeconds);
    if (handler_before != nullptr) handler_before();
    std::abort();
}

}  // namespace
}  // namespace hz

HZ_API void hz_let_late_threads_sleep(void) {
    hz::ending_thread = pthread_self();
    hz::handler_before = std::set_terminate(hz::on_terminate);
}
