// A persistent pool of threads, made at first use, that lives as long as the process.
//
// OpenMP is not used: torchrun sets OMP_NUM_THREADS=1 for every rank, and a second OpenMP runtime beside torch's spins
// against it. Threads inherit the affinity mask of the thread that first needs them. A forked child starts with an
// empty pool, because only the forking thread lives on in it. Nothing is torn down at exit: the pool is never
// destroyed, and threads that sleep or run when the process ends are ended by the system.
#include "pool.h"

#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>

namespace hz {
namespace {

constexpr int kMaxThreads = 1024;
// About 20 us: longer than the gap between two updates of a pipeline, shorter than what a sleeping neighbour notices.
constexpr int kSpins = 2000;

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

class Pool {
   public:
    int run(void (*task)(void*, int64_t), void* context, int64_t num_tasks, int threads) {
        std::lock_guard<std::mutex> one_at_a_time(run_mutex_);
        int helpers = threads - 1 < kMaxThreads ? threads - 1 : kMaxThreads;
        if (int error = grow(helpers)) return error;
        task_ = task;
        context_ = context;
        num_tasks_ = num_tasks;
        next_.store(0, std::memory_order_relaxed);
        pending_.store(helpers, std::memory_order_relaxed);
        if (helpers > 0) announce(helpers);
        work();
        if (helpers > 0) wait_for_helpers();
        return 0;
    }

   private:
    // Round number and number of helpers in one word. A thread that is not among the helpers of a round may sleep
    // through it and wake in a later one: with two words it could pair the old round with the new number.
    static uint64_t pack(uint64_t round, int helpers) { return round << 16 | static_cast<uint64_t>(helpers); }

    int grow(int helpers) {
        if (num_threads_ >= helpers) return 0;
        // Signals belong to the program's threads: Python expects them on its main thread.
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        int error = 0;
        try {
            while (num_threads_ < helpers) {
                std::thread(&Pool::serve, this, num_threads_, round_.load(std::memory_order_relaxed)).detach();
                ++num_threads_;
            }
        } catch (const std::system_error& failure) {
            error = failure.code().value() ? failure.code().value() : EAGAIN;
        } catch (const std::bad_alloc&) {
            error = ENOMEM;
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        return error;
    }

    void announce(int helpers) {
        uint64_t round = (round_.load(std::memory_order_relaxed) >> 16) + 1;
        {
            // Under the mutex: a helper that has just found no work and is about to sleep must not miss the call.
            std::lock_guard<std::mutex> lock(sleep_mutex_);
            round_.store(pack(round, helpers), std::memory_order_release);
        }
        start_.notify_all();
    }

    void work() {
        for (;;) {
            int64_t index = next_.fetch_add(1, std::memory_order_relaxed);
            if (index >= num_tasks_) return;
            task_(context_, index);
        }
    }

    void wait_for_helpers() {
        for (int spin = 0; spin < kSpins; ++spin) {
            if (pending_.load(std::memory_order_acquire) == 0) return;
            relax();
        }
        std::unique_lock<std::mutex> lock(sleep_mutex_);
        finished_.wait(lock, [this] { return pending_.load(std::memory_order_acquire) == 0; });
    }

    void serve(int number, uint64_t seen) {
        for (;;) {
            seen = next_round(seen);
            if (number >= static_cast<int>(seen & 0xffff)) continue;
            work();
            if (pending_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
                std::lock_guard<std::mutex> lock(sleep_mutex_);
                finished_.notify_one();
            }
        }
    }

    uint64_t next_round(uint64_t seen) {
        for (int spin = 0; spin < kSpins; ++spin) {
            uint64_t now = round_.load(std::memory_order_acquire);
            if (now != seen) return now;
            relax();
        }
        std::unique_lock<std::mutex> lock(sleep_mutex_);
        start_.wait(lock, [&] { return round_.load(std::memory_order_acquire) != seen; });
        return round_.load(std::memory_order_acquire);
    }

    std::mutex run_mutex_;
    std::mutex sleep_mutex_;
    std::condition_variable start_;
    std::condition_variable finished_;
    std::atomic<uint64_t> round_{0};
    std::atomic<int64_t> next_{0};
    std::atomic<int> pending_{0};
    void (*task_)(void*, int64_t) = nullptr;  // the task of the round, written before round_ is
    void* context_ = nullptr;
    int64_t num_tasks_ = 0;
    int num_threads_ = 0;
};

// Raw memory instead of an object: it is never destroyed, and a forked child builds a new pool over the old one, whose
// mutexes and counters may have been caught in any state.
alignas(Pool) unsigned char pool_memory[sizeof(Pool)];

void make_pool() { new (pool_memory) Pool; }

// When the library is loaded, and not at first use: a fork in the middle of a first use would leave the child with a
// guard that nobody opens. No thread is started here.
[[maybe_unused]] const int registered = (make_pool(), pthread_atfork(nullptr, nullptr, make_pool));

Pool& pool() { return *std::launder(reinterpret_cast<Pool*>(pool_memory)); }

}  // namespace

int run_tasks(void (*task)(void*, int64_t), void* context, int64_t num_tasks, int threads) {
    if (threads <= 1 || num_tasks <= 1) {
        // No lock: work of one thread may run beside the pool.
        for (int64_t index = 0; index < num_tasks; ++index) task(context, index);
        return 0;
    }
    return pool().run(task, context, num_tasks, threads);
}

}  // namespace hz
