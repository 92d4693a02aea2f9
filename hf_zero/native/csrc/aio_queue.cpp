// Cuts requests into blocks and puts the outcomes together again. Knows nothing of how a block is carried out.
//
// [Note: Ragged ends]
// O_DIRECT takes whole granules (pages, or more where the device wants it). A read takes the granules around its
// ragged ends through a bounce buffer. A write puts its ragged ends through the page cache, which leaves the
// neighbours alone without a read-modify-write of ours that could race with them. The kernel keeps both ways coherent:
// a direct read first writes back the dirty pages of its range, and a direct write drops them. That holds as long as
// no page is written both ways at once, which is why the granule is never less than a page.
#include "aio_queue.h"

#include <signal.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <system_error>

namespace hz {

namespace {

int64_t round_down(int64_t value, int64_t granule) { return value - value % granule; }
int64_t round_up(int64_t value, int64_t granule) { return round_down(value + granule - 1, granule); }

bool is_aligned(const char* memory, int64_t alignment) {
    return reinterpret_cast<uintptr_t>(memory) % static_cast<uintptr_t>(alignment) == 0;
}

// Seconds of the clock that Python's time.perf_counter reads.
double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

}  // namespace

void Bounces::make() {
    constexpr int64_t kHugePage = 2 << 20;
    int64_t size = round_up(count_ * nbytes_, kHugePage);
    void* memory = nullptr;
    if (posix_memalign(&memory, static_cast<size_t>(kHugePage), static_cast<size_t>(size)) != 0) return;
#ifdef MADV_HUGEPAGE
    madvise(memory, static_cast<size_t>(size), MADV_HUGEPAGE);  // small pages work, too
#endif
    memory_ = static_cast<char*>(memory);
}

int start_thread(std::thread& thread, std::function<void()> body) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = 0;
    try {
        thread = std::thread(std::move(body));
    } catch (const std::system_error& problem) {
        error = problem.code().value() ? problem.code().value() : EAGAIN;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return error;
}

int AioQueue::start(int32_t* engine, int32_t* ring_error) {
    *ring_error = 0;
    if (options.engine != HZ_AIO_THREADS) {
        engine_ = make_uring_engine();
        *ring_error = engine_->start(*this);
        *engine = HZ_AIO_URING;
        if (*ring_error == 0) return 0;
        engine_.reset();
        if (options.engine == HZ_AIO_URING) return *ring_error;
    }
    engine_ = make_threads_engine();
    *engine = HZ_AIO_THREADS;
    return engine_->start(*this);
}

int64_t AioQueue::submit(std::shared_ptr<AioFile> file, bool write, char* memory, int64_t nbytes, int64_t offset) {
    auto request = std::make_unique<Request>();
    request->file = std::move(file);
    request->memory = memory;
    request->offset = request->cursor = offset;
    request->end = offset + nbytes;
    request->write = write;
    request->done = nbytes == 0;
    request->result.ended_at = now();
    std::lock_guard<std::mutex> lock(mutex);
    if (stopping) return -EBADF;
    int64_t ticket = ++last_ticket_;
    if (nbytes > 0) waiting_.push_back(request.get());
    requests_.emplace(ticket, std::move(request));
    if (nbytes > 0) engine_->wake();
    return ticket;
}

int AioQueue::wait(int64_t ticket, int timeout_ms, hz_aio_result* result) {
    std::unique_lock<std::mutex> lock(mutex);
    auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms);
    for (;;) {
        auto found = requests_.find(ticket);  // again after every sleep: another thread may have waited for it too
        if (found == requests_.end()) return -ENOENT;
        if (found->second->done) {
            *result = found->second->result;
            requests_.erase(found);
            return 0;
        }
        if (request_done_.wait_until(lock, deadline) == std::cv_status::timeout) {
            found = requests_.find(ticket);
            if (found != requests_.end() && !found->second->done) return -ETIMEDOUT;
        }
    }
}

int AioQueue::done(int64_t ticket) {
    std::lock_guard<std::mutex> lock(mutex);
    auto found = requests_.find(ticket);
    return found == requests_.end() ? -ENOENT : found->second->done;
}

hz_aio_stats AioQueue::stats() {
    std::lock_guard<std::mutex> lock(mutex);
    return {submits_, operations_, completions_, refills_, max_in_flight_, bounced_, buffered_};
}

void AioQueue::stop() {
    std::lock_guard<std::mutex> only_once(stop_mutex_);
    if (stopped_) return;
    {
        std::lock_guard<std::mutex> lock(mutex);
        stopping = true;
        engine_->wake();
    }
    engine_->join();
    stopped_ = true;
}

bool AioQueue::take(Block& block) {
    if (waiting_.empty()) return false;
    Request& request = *waiting_.front();
    block = Block{};
    block.request = &request;
    block.memory = request.memory + (request.cursor - request.offset);
    block.offset = request.cursor;
    if (!request.file->direct) {
        block.size = std::min(options.block_size, request.end - request.cursor);
    } else if (request.write) {
        cut_write(request, block);
    } else {
        cut_read(request, block);
    }
    if (block.path != Path::bounce) {
        block.io_memory = block.memory;
        block.io_offset = block.offset;
        block.io_size = block.size;
    }
    request.cursor += block.size;
    request.blocks_under_way++;
    if (request.cursor == request.end) waiting_.pop_front();
    max_in_flight_ = std::max(max_in_flight_, ++in_flight);
    refills_ += partly_through_;
    return true;
}

// See [Note: Ragged ends].
void AioQueue::cut_write(Request& request, Block& block) const {
    const AioFile& file = *request.file;
    int64_t whole_start = round_up(block.offset, file.granule);
    int64_t whole_end = round_down(request.end, file.granule);
    if (block.offset < whole_start || block.offset >= whole_end) {
        block.size = std::min(block.offset < whole_start ? whole_start : request.end, request.end) - block.offset;
        return;
    }
    block.size = std::min(options.block_size, whole_end - block.offset);
    block.path = is_aligned(block.memory, file.memory_alignment) ? Path::direct : Path::bounce;
    block.io_offset = block.offset;
    block.io_size = block.size;
}

void AioQueue::cut_read(Request& request, Block& block) const {
    const AioFile& file = *request.file;
    int64_t start = round_down(block.offset, file.granule);
    int64_t whole_start = round_up(block.offset, file.granule);
    int64_t whole_end = round_down(request.end, file.granule);
    bool fits = is_aligned(block.memory + (whole_start - block.offset), file.memory_alignment);
    if (fits && block.offset == whole_start && block.offset < whole_end) {
        block.size = std::min(options.block_size, whole_end - block.offset);
        block.path = Path::direct;
        return;
    }
    // If the memory fits once the ragged start is out of the way, only that granule is bounced.
    bool only_start = fits && block.offset < whole_start && whole_start < whole_end;
    int64_t span_end = std::min(start + options.block_size, round_up(request.end, file.granule));
    if (only_start) span_end = whole_start;
    block.size = std::min(span_end, request.end) - block.offset;
    block.path = Path::bounce;
    block.io_offset = start;
    block.io_size = span_end - start;
}

void AioQueue::prepare(Block& block, Bounces& bounces, int64_t index) {
    if (block.path != Path::bounce) return;
    block.io_memory = bounces.get(index);
    if (!block.io_memory) {  // out of memory: the page cache does as well
        block.path = Path::buffered;
        block.io_memory = block.memory;
        block.io_offset = block.offset;
        block.io_size = block.size;
    } else if (block.request->write) {
        std::memcpy(block.io_memory, block.memory, static_cast<size_t>(block.size));
    }
}

bool AioQueue::settle(Block& block, int64_t outcome) {
    completions_++;
    if (block.path == Path::bounce) bounced_++;
    if (block.path == Path::buffered) buffered_++;
    if (outcome == -EINTR || outcome == -EAGAIN) return false;
    bool was_direct = block.path != Path::buffered;
    if (outcome < 0 && !(was_direct && outcome == -EINVAL)) {
        finish(block, HZ_AIO_SYSTEM, static_cast<int32_t>(-outcome));
        return true;
    }
    if (outcome == -EINVAL) {
        block.refused = true;
        outcome = 0;
    } else if (outcome > 0 && block.refused) {
        block.request->file->direct = false;
    }
    int64_t skipped = block.offset - block.io_offset;
    int64_t arrived = std::min(std::max<int64_t>(outcome - skipped, 0), block.size);
    if (block.path == Path::bounce && !block.request->write && arrived > 0)
        std::memcpy(block.memory, block.io_memory + skipped, static_cast<size_t>(arrived));
    block.memory += arrived;
    block.offset += arrived;
    block.size -= arrived;
    if (block.size == 0) {
        finish(block, HZ_AIO_OK, 0);
        return true;
    }
    if (!was_direct && outcome == 0) {
        finish(block, HZ_AIO_SHORT, 0);
        return true;
    }
    // The rest is no longer aligned, or at the end of the file: the page cache takes anything, and says for certain
    // where the file ends.
    block.path = Path::buffered;
    block.io_memory = block.memory;
    block.io_offset = block.offset;
    block.io_size = block.size;
    return false;
}

void AioQueue::finish(Block& block, int32_t kind, int32_t error) {
    std::lock_guard<std::mutex> lock(mutex);
    Request& request = *block.request;
    hz_aio_result& result = request.result;
    if (kind != HZ_AIO_OK && (result.kind == HZ_AIO_OK || block.offset < result.offset)) {
        result = {kind, error, block.offset, block.size, block.offset - request.offset, 0.0};
        // Blocks that were not begun would fail alike, or do not matter.
        auto place = std::find(waiting_.begin(), waiting_.end(), &request);
        if (place != waiting_.end()) waiting_.erase(place);
        request.cursor = request.end;
    }
    partly_through_ = --in_flight > 0;
    request.blocks_under_way--;
    if (request.blocks_under_way == 0 && request.cursor == request.end) {
        request.done = true;
        result.ended_at = now();
        request.file.reset();
        request_done_.notify_all();
    }
}

void AioQueue::count_submit(int64_t operations) {
    submits_++;
    operations_ += operations;
}

}  // namespace hz
