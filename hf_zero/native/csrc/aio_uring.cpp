// The engine on io_uring: one ring and one thread per `threads` of the settings, without liburing.
//
// A thread sleeps in one place, io_uring_enter. New work reaches it there through an eventfd that the ring polls.
#include "aio_queue.h"

#if defined(__linux__) && defined(__has_include)
#if __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#define HZ_HAVE_URING 1
#endif
#endif

#ifndef HZ_HAVE_URING

#include <cerrno>

namespace hz {
namespace {
class NoEngine final : public AioEngine {
  public:
    int start(AioQueue&) override { return ENOSYS; }
    void wake() override {}
    void join() override {}
};
}  // namespace
std::unique_ptr<AioEngine> make_uring_engine() { return std::make_unique<NoEngine>(); }
}  // namespace hz

#else

#include <sys/eventfd.h>
#include <time.h>

#include <cerrno>

#include "aio_ring.h"

namespace hz {

namespace {

constexpr uint64_t kWakeUp = ~uint64_t{0};
// The kernel may be short of memory for a moment; for so many milliseconds in a row it is taken for an error.
constexpr int kMaxRetries = 2000;
constexpr int kNotOpened = -1;

// One ring, and the thread that alone touches it.
class Worker {
  public:
    explicit Worker(AioQueue& queue)
        : queue_(queue), depth_(queue.options.queue_depth), blocks_(static_cast<size_t>(depth_)),
          bounces_(depth_, queue.options.block_size) {
        for (int i = depth_ - 1; i >= 0; i--) free_.push_back(i);
    }
    ~Worker() {
        if (wake_fd_ >= 0) close(wake_fd_);
    }

    int start() {
        wake_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        if (wake_fd_ < 0) return errno;
        int error = start_thread(thread_, [this] {
            // The thread that will use the ring makes it: a ring that belongs to one thread is cheaper.
            int problem = ring_.open(static_cast<unsigned>(depth_) + 1);
            {
                std::lock_guard<std::mutex> lock(opening_);
                outcome_ = problem;
                opened_.notify_one();
            }
            if (problem == 0) run();
        });
        if (error == 0) {
            std::unique_lock<std::mutex> lock(opening_);
            opened_.wait(lock, [this] { return outcome_ != kNotOpened; });
            error = outcome_;
        }
        if (error != 0 && thread_.joinable()) thread_.join();
        return error;
    }

    // The caller holds the queue's mutex.
    void wake() {
        if (!hears_) return;
        hears_ = false;
        uint64_t one = 1;
        ssize_t written = write(wake_fd_, &one, sizeof one);
        (void)written;  // fails only when the counter is full, and then the thread wakes anyway
    }

    void join() {
        if (thread_.joinable()) thread_.join();
    }

  private:
    void run() {
        ring_.add_poll(wake_fd_, kWakeUp);
        while (take_blocks()) {
            enter(1);
            ring_.each_completion([this](uint64_t id, int32_t outcome) { on_completion(id, outcome); });
        }
        ring_.close();
    }

    // Fills free slots with blocks. False at the end of everything.
    bool take_blocks() {
        taken_.clear();
        bool may_take = queue_.options.overlap_events || under_way_ == 0;
        {
            std::lock_guard<std::mutex> lock(queue_.mutex);
            while (may_take && !free_.empty() && queue_.take(blocks_[static_cast<size_t>(free_.back())])) {
                taken_.push_back(free_.back());
                free_.pop_back();
                under_way_++;
            }
            if (under_way_ == 0 && queue_.stopping && queue_.idle()) return false;
            hears_ = may_take && !free_.empty();
        }
        for (int index : taken_) {
            queue_.prepare(blocks_[static_cast<size_t>(index)], bounces_, index);
            add(index);
            if (queue_.options.single_submit) enter(0);
        }
        return true;
    }

    void add(int index) {
        const Block& block = blocks_[static_cast<size_t>(index)];
        ring_.add_transfer(block.request->write, block.io_fd(), block.io_memory, block.io_size, block.io_offset,
                           static_cast<uint64_t>(index));
        added_++;
    }

    // Hands everything that was added to the kernel, and sleeps until `min_complete` operations are through.
    void enter(unsigned min_complete) {
        int64_t operations = added_;
        int error = ring_.enter(min_complete);
        added_ = 0;
        if (operations > 0) queue_.count_submit(operations);
        bool busy = error == EAGAIN || error == EBUSY || error == ENOMEM;
        if (error == 0 || error == EINTR) {
            retries_ = 0;
        } else if (busy && ++retries_ < kMaxRetries) {
            timespec pause{0, 1000000};
            nanosleep(&pause, nullptr);
        } else {
            retries_ = 0;
            for (uint64_t id : ring_.take_back()) on_completion(id, busy ? -ENOMEM : -error);
        }
    }

    void on_completion(uint64_t id, int32_t outcome) {
        if (id == kWakeUp) {
            uint64_t count;
            ssize_t got = read(wake_fd_, &count, sizeof count);
            (void)got;
            ring_.add_poll(wake_fd_, kWakeUp);
            return;
        }
        int index = static_cast<int>(id);
        if (queue_.settle(blocks_[static_cast<size_t>(index)], outcome)) {
            free_.push_back(index);
            under_way_--;
        } else {
            add(index);
        }
    }

    AioQueue& queue_;
    const int depth_;
    std::vector<Block> blocks_;  // by place; a place's number is the id of its operation
    Bounces bounces_;
    std::vector<int> free_;
    std::vector<int> taken_;
    Ring ring_;
    std::thread thread_;
    std::mutex opening_;
    std::condition_variable opened_;
    int outcome_ = kNotOpened;  // 0 or errno of the ring's opening; guarded by opening_
    int wake_fd_ = -1;
    int under_way_ = 0;
    int64_t added_ = 0;
    int retries_ = 0;
    bool hears_ = false;  // asleep with room for more, or about to be; guarded by the queue's mutex
};
class UringEngine final : public AioEngine {
  public:
    int start(AioQueue& queue) override {
        for (int i = 0; i < queue.options.threads; i++) {
            workers_.push_back(std::make_unique<Worker>(queue));
            int error = workers_.back()->start();
            if (error == 0) continue;
            workers_.pop_back();
            {
                std::lock_guard<std::mutex> lock(queue.mutex);
                queue.stopping = true;
                wake();
            }
            join();
            queue.stopping = false;  // the next engine starts afresh; no other thread is left
            return error;
        }
        return 0;
    }

    void wake() override {
        for (auto& worker : workers_) worker->wake();
    }

    void join() override {
        for (auto& worker : workers_) worker->join();
    }

  private:
    std::vector<std::unique_ptr<Worker>> workers_;
};

}  // namespace

std::unique_ptr<AioEngine> make_uring_engine() { return std::make_unique<UringEngine>(); }

}  // namespace hz

#endif
