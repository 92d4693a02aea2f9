// One io_uring by raw system calls. Included only where <linux/io_uring.h> exists. Used by one thread, which opens it.
#pragma once

#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <vector>

namespace hz {

class Ring {
  public:
    ~Ring() { close(); }

    // Room for `entries` operations. Returns 0 or errno; ENOSYS also where the kernel lacks a needed operation.
    int open(unsigned entries) {
        int error = EINVAL;
        // Completions are worked off when this thread asks for them instead of interrupting it. Older kernels refuse.
        unsigned choices[] = {kOneThread, 0};
        for (unsigned flags : choices) {
            std::memset(&params_, 0, sizeof params_);
            params_.flags = flags;
            fd_ = static_cast<int>(syscall(__NR_io_uring_setup, entries, &params_));
            error = fd_ < 0 ? errno : 0;
            if (error != EINVAL) break;
        }
        if (error == 0) error = has_operations() && (params_.features & IORING_FEAT_SINGLE_MMAP) ? map() : ENOSYS;
        if (error != 0) close();
        return error;
    }

    void close() {
        if (sqes_) munmap(sqes_, sqes_bytes_);
        if (rings_) munmap(rings_, rings_bytes_);
        if (fd_ >= 0) ::close(fd_);
        sqes_ = nullptr;
        rings_ = nullptr;
        fd_ = -1;
    }

    void add_transfer(bool write, int fd, void* memory, int64_t nbytes, int64_t offset, uint64_t id) {
        io_uring_sqe& sqe = add(write ? IORING_OP_WRITE : IORING_OP_READ, fd, id);
        sqe.addr = reinterpret_cast<uint64_t>(memory);
        sqe.len = static_cast<uint32_t>(nbytes);
        sqe.off = static_cast<uint64_t>(offset);
    }

    // One completion when `fd` becomes readable.
    void add_poll(int fd, uint64_t id) { add(IORING_OP_POLL_ADD, fd, id).poll_events = 1 /* POLLIN */; }

    unsigned unsubmitted() const { return tail_ - __atomic_load_n(sq_head_, __ATOMIC_ACQUIRE); }

    // Hands over what was added and returns once `min_complete` completions are there. Returns 0 or errno.
    int enter(unsigned min_complete) {
        __atomic_store_n(sq_tail_, tail_, __ATOMIC_RELEASE);
        unsigned flags = min_complete > 0 ? IORING_ENTER_GETEVENTS : 0;
        return syscall(__NR_io_uring_enter, fd_, unsubmitted(), min_complete, flags, nullptr, 0) < 0 ? errno : 0;
    }

    template <typename Handle>
    void each_completion(Handle handle) {
        unsigned head = *cq_head_;
        while (head != __atomic_load_n(cq_tail_, __ATOMIC_ACQUIRE)) {
            io_uring_cqe cqe = cqes_[head & cq_mask_];
            __atomic_store_n(cq_head_, ++head, __ATOMIC_RELEASE);
            handle(cqe.user_data, cqe.res);
        }
    }

    // Takes back what the kernel did not accept; returns the ids.
    std::vector<uint64_t> take_back() {
        std::vector<uint64_t> ids;
        for (unsigned head = __atomic_load_n(sq_head_, __ATOMIC_ACQUIRE); head != tail_; tail_--)
            ids.push_back(sqes_[(tail_ - 1) & sq_mask_].user_data);
        __atomic_store_n(sq_tail_, tail_, __ATOMIC_RELEASE);
        return ids;
    }

  private:
#if defined(IORING_SETUP_SINGLE_ISSUER) && defined(IORING_SETUP_DEFER_TASKRUN)
    static constexpr unsigned kOneThread = IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN;
#else
    static constexpr unsigned kOneThread = 0;
#endif

    bool has_operations() {
        constexpr unsigned kCount = 64;
        std::vector<uint64_t> memory((sizeof(io_uring_probe) + kCount * sizeof(io_uring_probe_op)) / 8 + 1);
        auto* probe = reinterpret_cast<io_uring_probe*>(memory.data());
        if (syscall(__NR_io_uring_register, fd_, IORING_REGISTER_PROBE, probe, kCount) < 0) return false;
        for (unsigned operation : {IORING_OP_READ, IORING_OP_WRITE, IORING_OP_POLL_ADD})
            if (operation > probe->last_op || !(probe->ops[operation].flags & IO_URING_OP_SUPPORTED)) return false;
        return true;
    }

    int map() {
        size_t sq_bytes = params_.sq_off.array + params_.sq_entries * sizeof(unsigned);
        size_t cq_bytes = params_.cq_off.cqes + params_.cq_entries * sizeof(io_uring_cqe);
        rings_bytes_ = sq_bytes > cq_bytes ? sq_bytes : cq_bytes;
        sqes_bytes_ = params_.sq_entries * sizeof(io_uring_sqe);
        void* rings = mmap_at(rings_bytes_, IORING_OFF_SQ_RING);
        if (rings == MAP_FAILED) return errno;
        rings_ = static_cast<char*>(rings);
        void* sqes = mmap_at(sqes_bytes_, IORING_OFF_SQES);
        if (sqes == MAP_FAILED) return errno;
        sqes_ = static_cast<io_uring_sqe*>(sqes);
        sq_head_ = at(params_.sq_off.head);
        sq_tail_ = at(params_.sq_off.tail);
        sq_mask_ = *at(params_.sq_off.ring_mask);
        cq_head_ = at(params_.cq_off.head);
        cq_tail_ = at(params_.cq_off.tail);
        cq_mask_ = *at(params_.cq_off.ring_mask);
        cqes_ = reinterpret_cast<io_uring_cqe*>(rings_ + params_.cq_off.cqes);
        for (unsigned i = 0; i < params_.sq_entries; i++) at(params_.sq_off.array)[i] = i;
        tail_ = *sq_tail_;
        return 0;
    }

    void* mmap_at(size_t nbytes, int64_t offset) {
        return mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_, offset);
    }

    unsigned* at(unsigned offset) { return reinterpret_cast<unsigned*>(rings_ + offset); }

    // There is room: at most `entries` operations are added or under way.
    io_uring_sqe& add(unsigned operation, int fd, uint64_t id) {
        io_uring_sqe& sqe = sqes_[tail_ & sq_mask_];
        std::memset(&sqe, 0, sizeof sqe);
        sqe.opcode = static_cast<uint8_t>(operation);
        sqe.fd = fd;
        sqe.user_data = id;
        tail_++;
        return sqe;
    }

    io_uring_params params_{};
    int fd_ = -1;
    char* rings_ = nullptr;
    size_t rings_bytes_ = 0;
    io_uring_sqe* sqes_ = nullptr;
    size_t sqes_bytes_ = 0;
    unsigned* sq_head_ = nullptr;
    unsigned* sq_tail_ = nullptr;
    unsigned sq_mask_ = 0;
    unsigned* cq_head_ = nullptr;
    unsigned* cq_tail_ = nullptr;
    unsigned cq_mask_ = 0;
    io_uring_cqe* cqes_ = nullptr;
    unsigned tail_ = 0;
};

}  // namespace hz
