// The C interface: handles, opening of files, and the guard against use after a fork.
#include <fcntl.h>
#include <pthread.h>
#include <sys/syscall.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>

#include "aio_queue.h"

namespace hz {

namespace {

// Queues and files by handle. Never destroyed: threads may still use it while the process ends.
struct Registry {
    std::mutex mutex;
    int64_t last = 0;
    std::unordered_map<int64_t, std::shared_ptr<AioQueue>> queues;
    std::unordered_map<int64_t, std::shared_ptr<AioFile>> files;
};

Registry& registry() {
    static Registry* instance = [] {
        // A fork while another thread holds the mutex would leave it locked in the child for ever.
        pthread_atfork([] { registry().mutex.lock(); }, [] { registry().mutex.unlock(); },
                       [] { registry().mutex.unlock(); });
        return new Registry;
    }();
    return *instance;
}

template <typename T>
std::shared_ptr<T> look_up(std::unordered_map<int64_t, std::shared_ptr<T>>& table, int64_t handle, bool remove) {
    std::lock_guard<std::mutex> lock(registry().mutex);
    auto found = table.find(handle);
    if (found == table.end()) return nullptr;
    std::shared_ptr<T> object = found->second;
    if (remove) table.erase(found);
    return object;
}

template <typename T>
int64_t enter(std::unordered_map<int64_t, std::shared_ptr<T>>& table, std::shared_ptr<T> object) {
    std::lock_guard<std::mutex> lock(registry().mutex);
    int64_t handle = ++registry().last;
    table.emplace(handle, std::move(object));
    return handle;
}

// The queue, or null and why.
std::shared_ptr<AioQueue> find_queue(int64_t handle, int32_t* error, bool remove = false) {
    auto queue = look_up(registry().queues, handle, remove);
    *error = !queue ? -EBADF : queue->pid != getpid() ? -EOWNERDEAD : 0;
    if (*error == -EOWNERDEAD && remove) new std::shared_ptr<AioQueue>(queue);  // its threads cannot be joined here
    return *error == 0 ? queue : nullptr;
}

bool is_power_of_two(int64_t value) { return value > 0 && (value & (value - 1)) == 0; }

// Asks for the alignment of direct transfers; false if the file system says that it has none.
bool read_alignment(int fd, AioFile& file) {
    int64_t page = sysconf(_SC_PAGESIZE);
    file.granule = std::max<int64_t>(page, 4096);
    file.memory_alignment = file.granule;
#if defined(__linux__) && defined(SYS_statx)
    // By hand: the fields (Linux 6.1) are younger than many system headers.
    constexpr unsigned kDioAlign = 0x2000;
    unsigned char facts[256] = {};
    uint32_t mask, memory, offset;
    if (syscall(SYS_statx, fd, "", 0x1000 /* AT_EMPTY_PATH */, kDioAlign, facts) != 0) return true;
    std::memcpy(&mask, facts, 4);
    std::memcpy(&memory, facts + 0x98, 4);
    std::memcpy(&offset, facts + 0x9c, 4);
    if (!(mask & kDioAlign)) return true;
    if (!is_power_of_two(memory) || !is_power_of_two(offset)) return false;
    // Bounce buffers lie at multiples of the granule, so it is never less than what memory needs.
    file.granule = std::max({file.granule, int64_t{offset}, int64_t{memory}});
    file.memory_alignment = memory;
#endif
    return true;
}

int open_again(const char* path, int flags) {
    int fd;
    do {
        fd = open(path, flags, 0600);
    } while (fd < 0 && errno == EINTR);
    return fd;
}

void describe(const AioFile& file, hz_aio_file_info* info) {
    *info = {file.fd, file.direct ? 1 : 0, file.direct ? file.granule : 1, file.direct ? file.memory_alignment : 1};
}

}  // namespace

}  // namespace hz

using namespace hz;

HZ_API int64_t hz_aio_create(const hz_aio_options* options, int32_t* engine, int32_t* ring_error) try {
    auto queue = std::make_shared<AioQueue>(*options);
    int error = queue->start(engine, ring_error);
    return error == 0 ? enter(registry().queues, queue) : -error;
} catch (const std::bad_alloc&) {
    return -ENOMEM;
}

HZ_API int32_t hz_aio_stop(int64_t handle) {
    int32_t error;
    auto queue = find_queue(handle, &error);
    if (queue) queue->stop();
    return error;
}

HZ_API int32_t hz_aio_destroy(int64_t handle) {
    int32_t error;
    auto queue = find_queue(handle, &error, true);
    if (queue) queue->stop();
    return error;
}

HZ_API int64_t hz_aio_open(const char* path, int32_t write, int32_t create, int32_t direct, hz_aio_file_info* info) {
    auto file = std::make_shared<AioFile>();
    int flags = O_CLOEXEC | (write ? O_RDWR : O_RDONLY);
    file->fd = open_again(path, flags | (create ? O_CREAT : 0));
    if (file->fd < 0) return -errno;
#ifdef O_DIRECT
    if (direct && read_alignment(file->fd, *file)) {
        file->direct_fd = open_again(path, flags | O_DIRECT);
        if (file->direct_fd < 0 && errno != EINVAL && errno != EOPNOTSUPP) return -errno;
        file->direct = file->direct_fd >= 0;
        // Ragged ends are single pages: reading ahead would fill the page cache with what goes direct.
        if (file->direct) posix_fadvise(file->fd, 0, 0, POSIX_FADV_RANDOM);
    }
#else
    (void)direct;
#endif
    describe(*file, info);
    return enter(registry().files, file);
}

HZ_API int32_t hz_aio_file_info_of(int64_t handle, hz_aio_file_info* info) {
    auto file = look_up(registry().files, handle, false);
    if (!file) return -EBADF;
    describe(*file, info);
    return 0;
}

HZ_API int32_t hz_aio_preallocate(int64_t handle, int64_t nbytes) {
    auto file = look_up(registry().files, handle, false);
    if (!file) return -EBADF;
    int result;
#ifdef __linux__
    // Not posix_fallocate, which writes to every block where the file system cannot allocate.
    do {
        result = nbytes > 0 ? fallocate(file->fd, 0, 0, nbytes) : 0;
    } while (result != 0 && errno == EINTR);
    if (result == 0 || (errno != EOPNOTSUPP && errno != ENOSYS)) return result == 0 ? 0 : -errno;
#endif
    do {
        result = ftruncate(file->fd, nbytes);
    } while (result != 0 && errno == EINTR);
    return result == 0 ? 0 : -errno;
}

HZ_API int32_t hz_aio_close(int64_t handle) { return look_up(registry().files, handle, true) ? 0 : -EBADF; }

HZ_API int64_t hz_aio_submit(int64_t handle, int64_t file_handle, int32_t write, void* memory, int64_t nbytes,
                             int64_t offset) try {
    int32_t error;
    auto queue = find_queue(handle, &error);
    if (!queue) return error;
    auto file = look_up(registry().files, file_handle, false);
    if (!file) return -EBADF;
    if (nbytes < 0 || offset < 0 || (file->direct && queue->options.block_size % file->granule != 0)) return -EINVAL;
    return queue->submit(std::move(file), write != 0, static_cast<char*>(memory), nbytes, offset);
} catch (const std::bad_alloc&) {
    return -ENOMEM;
}

HZ_API int32_t hz_aio_wait(int64_t handle, int64_t ticket, int32_t timeout_ms, hz_aio_result* result) {
    int32_t error;
    auto queue = find_queue(handle, &error);
    return queue ? queue->wait(ticket, timeout_ms, result) : error;
}

HZ_API int32_t hz_aio_done(int64_t handle, int64_t ticket) {
    int32_t error;
    auto queue = find_queue(handle, &error);
    return queue ? queue->done(ticket) : error;
}

HZ_API int32_t hz_aio_stats_of(int64_t handle, hz_aio_stats* stats) {
    int32_t error;
    auto queue = find_queue(handle, &error);
    if (queue) *stats = queue->stats();
    return error;
}
