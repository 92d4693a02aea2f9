// The engine of threads that call pread and pwrite, for kernels and containers without io_uring.
//
// One thread has one block under way, so a queue depth costs as many threads; beyond kMaxPerThread per thread of
// the settings the disk gains nothing and the memory for stacks does not pay.
#include <algorithm>
#include <cerrno>

#include "aio_queue.h"

namespace hz {

namespace {

constexpr int kMaxPerThread = 8;

class ThreadsEngine final : public AioEngine {
  public:
    int start(AioQueue& queue) override {
        queue_ = &queue;
        int64_t depth = std::min(queue.options.queue_depth, kMaxPerThread);
        threads_.resize(static_cast<size_t>(depth * queue.options.threads));
        bounces_ = std::make_unique<Bounces>(threads_.size(), queue.options.block_size);
        for (size_t i = 0; i < threads_.size(); i++) {
            int error = start_thread(threads_[i], [this, i] { run(static_cast<int64_t>(i)); });
            if (error == 0) continue;
            {
                std::lock_guard<std::mutex> lock(queue.mutex);
                queue.stopping = true;
            }
            join();
            return error;
        }
        return 0;
    }

    void wake() override { work_.notify_all(); }

    void join() override {
        work_.notify_all();
        for (std::thread& thread : threads_)
            if (thread.joinable()) thread.join();
    }

  private:
    // The caller holds the mutex.
    bool take(Block& block) {
        if (queue_->options.overlap_events) return queue_->take(block);
        if (batch_.empty()) {
            if (queue_->in_flight > 0) return false;
            while (batch_.size() < threads_.size() && queue_->take(block)) batch_.push_back(block);
            if (batch_.empty()) return false;
            work_.notify_all();
        }
        block = batch_.front();
        batch_.pop_front();
        return true;
    }

    void run(int64_t index) {
        Block block;
        std::unique_lock<std::mutex> lock(queue_->mutex);
        for (;;) {
            if (!take(block)) {
                if (queue_->stopping && queue_->idle() && batch_.empty()) return;
                work_.wait(lock);
                continue;
            }
            lock.unlock();
            queue_->prepare(block, *bounces_, index);
            bool through = false;
            while (!through) {
                queue_->count_submit(1);
                through = queue_->settle(block, transfer(block));
            }
            lock.lock();
            // Others wait for the end of the batch, or for the end of everything.
            if (queue_->in_flight == 0) work_.notify_all();
        }
    }

    static int64_t transfer(const Block& block) {
        size_t size = static_cast<size_t>(block.io_size);
        ssize_t count = block.request->write ? pwrite(block.io_fd(), block.io_memory, size, block.io_offset)
                                             : pread(block.io_fd(), block.io_memory, size, block.io_offset);
        return count < 0 ? -errno : count;
    }

    AioQueue* queue_ = nullptr;
    std::vector<std::thread> threads_;
    std::unique_ptr<Bounces> bounces_;
    std::condition_variable work_;
    // Blocks under way that no thread has begun, if overlap_events is off. Guarded by the queue's mutex.
    std::deque<Block> batch_;
};

}  // namespace

std::unique_ptr<AioEngine> make_threads_engine() { return std::make_unique<ThreadsEngine>(); }

}  // namespace hz
