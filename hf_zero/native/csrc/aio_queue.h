// Requests, the blocks that they are cut into, and the queue that hands blocks to the engine's threads.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

#include "hz_aio.h"

namespace hz {

// An open file. Offsets and lengths that are multiples of `granule`, from memory at a multiple of `memory_alignment`,
// may go through `direct_fd`; everything may go through `fd`.
struct AioFile {
    int fd = -1;
    int direct_fd = -1;
    int64_t granule = 1;
    int64_t memory_alignment = 1;
    std::atomic<bool> direct{false};  // becomes false for good when the device refuses what should have been aligned

    ~AioFile() {
        if (direct_fd >= 0) close(direct_fd);
        if (fd >= 0) close(fd);
    }
};

struct Request {
    std::shared_ptr<AioFile> file;
    char* memory;
    int64_t offset;
    int64_t end;
    int64_t cursor;  // file offset up to which blocks were handed out
    int64_t blocks_under_way = 0;
    bool write;
    bool done = false;
    hz_aio_result result{};
};

enum class Path { direct, bounce, buffered };

// One operation of at most block_size bytes. `memory` .. `size` are the bytes that were asked for; `io_*` is what the
// operation really transfers, which is more of the file where a read goes through a bounce buffer.
struct Block {
    Request* request = nullptr;
    Path path = Path::buffered;
    char* memory = nullptr;
    int64_t offset = 0;
    int64_t size = 0;
    char* io_memory = nullptr;
    int64_t io_offset = 0;
    int64_t io_size = 0;
    bool refused = false;  // O_DIRECT was refused with EINVAL, and this is the second try

    int io_fd() const { return path == Path::buffered ? request->file->fd : request->file->direct_fd; }
};

// The bounce buffers of the blocks in flight of one engine thread or of several, made when the first is needed.
//
// One piece of memory on huge pages, if there are any: a block on small pages is a list of hundreds of them, more than
// many devices take at once; scripts/bench_io.py measures the difference.
class Bounces {
  public:
    Bounces(int64_t count, int64_t nbytes) : count_(count), nbytes_(nbytes) {}
    Bounces(const Bounces&) = delete;
    Bounces& operator=(const Bounces&) = delete;
    ~Bounces() { std::free(memory_); }

    // Null if there is no memory.
    char* get(int64_t index) {
        std::call_once(made_, [this] { make(); });
        return memory_ ? memory_ + index * nbytes_ : nullptr;
    }

  private:
    void make();

    const int64_t count_;
    const int64_t nbytes_;
    std::once_flag made_;
    char* memory_ = nullptr;
};

class AioQueue;

// The threads that carry out blocks. The queue calls `wake` with its mutex held, when blocks were added or at the end.
class AioEngine {
  public:
    virtual ~AioEngine() = default;
    // Returns 0, or errno: then nothing is left behind.
    virtual int start(AioQueue& queue) = 0;
    virtual void wake() = 0;
    // Called once, after AioQueue::stopping became true and `wake`.
    virtual void join() = 0;
};

std::unique_ptr<AioEngine> make_uring_engine();
std::unique_ptr<AioEngine> make_threads_engine();

class AioQueue {
  public:
    explicit AioQueue(const hz_aio_options& options) : options(options), pid(getpid()) {}

    // Returns 0 or errno. ring_error: see hz_aio_create.
    int start(int32_t* engine, int32_t* ring_error);
    int64_t submit(std::shared_ptr<AioFile> file, bool write, char* memory, int64_t nbytes, int64_t offset);
    int wait(int64_t ticket, int timeout_ms, hz_aio_result* result);
    int done(int64_t ticket);
    hz_aio_stats stats();
    // Waits for everything that was submitted and ends the threads; submit fails from the call on, wait does not.
    void stop();

    // ------------------------------------------------------------ for engines
    // Takes the next block, or returns false, with the mutex held. The block counts as under way from then on.
    bool take(Block& block);
    // Gives a block that was taken its transfer buffer. Without the mutex: it may copy.
    void prepare(Block& block, Bounces& bounces, int64_t index);
    // The outcome of one operation: bytes, or -errno. True when the block is through; false when it was changed to
    // what is still to do. Without the mutex.
    bool settle(Block& block, int64_t outcome);
    void count_submit(int64_t operations);
    // Tells, with the mutex held, whether nothing is left to take.
    bool idle() const { return waiting_.empty(); }

    const hz_aio_options options;
    const pid_t pid;
    std::mutex mutex;
    bool stopping = false;  // guarded by mutex
    int64_t in_flight = 0;  // blocks under way, guarded by mutex

  private:
    void cut_read(Request& request, Block& block) const;
    void cut_write(Request& request, Block& block) const;
    void finish(Block& block, int32_t kind, int32_t error);

    std::unique_ptr<AioEngine> engine_;
    std::mutex stop_mutex_;
    bool stopped_ = false;  // guarded by stop_mutex_
    std::condition_variable request_done_;
    std::unordered_map<int64_t, std::unique_ptr<Request>> requests_;
    std::deque<Request*> waiting_;  // requests with blocks that were not handed out yet, in order of submission
    int64_t last_ticket_ = 0;
    int64_t max_in_flight_ = 0;
    int64_t refills_ = 0;
    bool partly_through_ = false;  // some, and not all, of the blocks that were under way together are through
    std::atomic<int64_t> submits_{0}, operations_{0}, completions_{0}, bounced_{0}, buffered_{0};
};

// Starts a thread that takes no signals: those of the program belong to its own threads. Returns 0 or errno.
int start_thread(std::thread& thread, std::function<void()> body);

}  // namespace hz
