// "lag": a device of torch (PrivateUse1) for tests, whose streams are as late, or as early, as their rules allow.
//
// Its memory is host memory and its kernels are the CPU's. What it has of a real accelerator is the order of things:
//   - A stream is a queue of tasks, an event a position in one. No thread serves the queues: who must wait for a task
//     runs it. A schedule decides what runs before that, so every run is deterministic and a seed replays.
//   - An operation runs at the call, after all that is queued on the current stream: it honours the waits that the
//     program made, and no others. Copies between pinned host memory and the device are queued.
//   - What only a race would read is 0xFF, NaN in every floating type: fresh and freed memory, and the target of a
//     copy to the host until the host has waited for the copy.
//   - Every stream and the host have a clock: how far they know the other streams to be. Memory that is freed, or
//     written by the host, while a copy or an operation that the clock does not cover may use it is reported.
//
// Locks: one, `World::mutex`. Never take Python's lock under it, nor take or drop a reference to a tensor that may be
// Python's: the first reference beside Python's own takes that lock. Gloo takes it when a collective begins, so `Locked`
// waits without it.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

namespace lag {
namespace {

constexpr c10::DeviceType kLag = c10::DeviceType::PrivateUse1;
constexpr int kDevices = 4;  // a process sees LAG_DEVICES of them
// Streams of a device beside its default one; who asks for more shares them, as on CUDA.
constexpr int kPool = 32;
constexpr int kPoison = 0xFF;
constexpr size_t kAlignment = 64;

// ---------------------------------------------------------------- streams, events and what is known of them
// Of each stream, how many of its tasks are known to be over.
using Clock = std::map<int, int64_t>;

void join(Clock& clock, const Clock& other) {
    for (const auto& [stream, position] : other) clock[stream] = std::max(clock[stream], position);
}

bool covers(const Clock& clock, int stream, int64_t position) {
    const auto found = clock.find(stream);
    return found != clock.end() && found->second >= position;
}

struct Queue {
    int key = 0;
    std::deque<std::function<void()>> tasks;
    int64_t issued = 0;  // tasks that were ever put in, operations included
    int64_t done = 0;
    Clock clock;  // what is over when the last task issued is
};

struct Event {
    int stream = 0;
    int64_t position = 0;
    Clock clock;
    std::chrono::steady_clock::time_point time;
};

// A copy between pinned host memory and the device that the host does not know to be over.
struct HostCopy {
    int stream = 0;
    int64_t position = 0;
    bool to_host = false;
    bool has_run = false;
    bool is_checked = false;  // of a copy to the device: whether `checksum` must still hold
    size_t checksum = 0;
    at::Tensor host;
    at::Tensor staged;  // of a copy to the host: what the host will see once it has waited
    std::string name;
};

struct Block {  // of device memory
    void* data = nullptr;
    size_t nbytes = 0;
    int device = 0;
    int stream = 0;          // the current one when it was taken: who takes it next may run there
    Clock uses;              // the last task of each stream that names it
    std::set<int> recorded;  // record_stream
};

enum class Schedule { kLate, kEarly, kRandom };

struct World {
    std::recursive_mutex mutex;
    int depth = 0;  // how often the lock is held
    std::map<int, Queue> queues;
    int streams_made[kDevices] = {};
    Clock host;
    Schedule schedule = Schedule::kLate;
    std::mt19937 random;
    bool has_collectives = false;
    std::list<HostCopy> copies;
    std::list<HostCopy> over;            // of them, to be dropped when the lock is not held
    std::map<uintptr_t, size_t> pinned;  // start and length
    size_t pinned_limit = 0;             // bytes of it that the host allows; 0 means any
    std::vector<std::string> reports;    // mistakes found
    size_t raised = 0;                   // of them
    std::vector<std::pair<std::string, std::string>> syncs;  // kind, place in Python
    c10::CachingDeviceAllocator::DeviceStats stats[kDevices];
    size_t memory_limit = 0;  // bytes per device; 0 means none
};

std::atomic<uint64_t> calls_made = 0;  // see let_a_stalled_device_run

World& world() {
    static World* const only = new World;  // tensors may outlive statics
    return *only;
}

class Locked {
public:
    Locked() {
        ++calls_made;
        lock();
        ++world().depth;
    }
    ~Locked() {
        std::list<HostCopy> over;  // ends after the unlocking: a host tensor may need Python's lock to go
        if (--world().depth == 0) over.swap(world().over);
        world().mutex.unlock();
    }
    Locked(const Locked&) = delete;
    Locked& operator=(const Locked&) = delete;

private:
    // Python's lock is free while a thread waits here, because torch's record of a collective takes it. It is taken back
    // without this one: a thread that waits for it may end there, as Python ends.
    static void lock() {
        while (!world().mutex.try_lock()) {
            if (!PyGILState_Check()) return world().mutex.lock();
            const pybind11::gil_scoped_release without_python;
            std::this_thread::sleep_for(std::chrono::microseconds(50));
        }
    }
};

thread_local int current_device = 0;
thread_local int current_stream[kDevices] = {};
// Whether this thread has called a collective. Where there are any, others draw no coins: these must fall alike on all
// ranks, and a thread that updates beside the training comes at moments of its own.
thread_local bool calls_collectives = false;
// What this thread is at, for reports.
thread_local std::string doing = "nothing";

int index_of(c10::Device device) { return device.has_index() ? device.index() : current_device; }

int key_of(int device, int64_t stream) { return device * (kPool + 1) + static_cast<int>(stream); }

int key_of(const c10::Stream& stream) { return key_of(index_of(stream.device()), stream.id()); }

std::string name_of(int key) {
    return "stream " + std::to_string(key % (kPool + 1)) + " of lag:" + std::to_string(key / (kPool + 1));
}

Queue& queue_of(int key) {
    Queue& queue = world().queues[key];
    queue.key = key;
    return queue;
}

int current_key(int device) { return key_of(device, current_stream[device]); }

Queue& current_queue(int device) { return queue_of(current_key(device)); }

// A mistake is found where nothing can be raised (a destructor, another thread's task): the next call here raises it.
void report(const std::string& text) { world().reports.push_back(text + "; found in " + doing); }

void raise_reports() {
    Locked lock;
    World& w = world();
    if (w.raised == w.reports.size()) return;
    std::string text;
    for (; w.raised < w.reports.size(); ++w.raised) text += (text.empty() ? "" : "\n") + w.reports[w.raised];
    TORCH_CHECK(false, "lag: ", text);
}

// The caller's place in Python; takes Python's lock.
PyObject* locator = nullptr;

std::string where() {
    if (locator == nullptr || !Py_IsInitialized()) return "";
    pybind11::gil_scoped_acquire python;
    return pybind11::reinterpret_borrow<pybind11::object>(locator)().cast<std::string>();
}

// ---------------------------------------------------------------- running tasks
void advance(Queue& queue, int64_t position) {
    while (queue.done < position) {
        const std::function<void()> task = std::move(queue.tasks.front());
        queue.tasks.pop_front();
        task();
        ++queue.done;
    }
}

// Runs what the schedule wants to be run now. Not where torch keeps Python's lock, as in an event's record and wait: a
// collective waits for other ranks, and who is to abort it would wait for the lock.
void let_run() {
    World& w = world();
    if (w.schedule == Schedule::kLate || PyGILState_Check()) return;
    if (w.schedule == Schedule::kRandom && w.has_collectives && !calls_collectives) return;
    for (auto& [key, queue] : w.queues)
        while (queue.done < queue.issued && (w.schedule == Schedule::kEarly || w.random() % 2 == 0))
            advance(queue, queue.done + 1);
}

void issue(Queue& queue, std::function<void()> task) {
    queue.tasks.push_back(std::move(task));
    queue.clock[queue.key] = ++queue.issued;
}

// An operation on the current stream: all that was queued there is over, and so is the operation when it returns.
Queue& begin_operation(int device) {
    Queue& queue = current_queue(device);
    advance(queue, queue.issued);
    queue.clock[queue.key] = ++queue.issued;
    ++queue.done;
    return queue;
}

void make_wait(Queue& queue, int stream, int64_t position, const Clock& clock) {
    if (queue.key != stream) issue(queue, [stream, position] { advance(queue_of(stream), position); });
    join(queue.clock, clock);
    let_run();
}

// ---------------------------------------------------------------- what the host knows
at::Tensor alias_of(const at::Tensor& tensor);

std::string_view bytes_of(const at::Tensor& host) {
    return {static_cast<const char*>(host.const_data_ptr()), host.nbytes()};
}

size_t checksum_of(const at::Tensor& host) { return std::hash<std::string_view>{}(bytes_of(host)); }

bool overlap(const at::Tensor& a, const at::Tensor& b) {
    const std::string_view x = bytes_of(a), y = bytes_of(b);
    return x.data() < y.data() + y.size() && y.data() < x.data() + x.size();
}

void check_source(HostCopy& copy) {
    if (copy.is_checked && checksum_of(copy.host) != copy.checksum) {
        copy.is_checked = false;
        report("the host wrote to the source of " + copy.name + " before it knew that the copy was over");
    }
}

// The host has waited for all that `clock` covers: it sees what was copied to it, and may write to what was read.
void host_reaches(const Clock& clock) {
    World& w = world();
    join(w.host, clock);
    for (auto next = w.copies.begin(); next != w.copies.end();) {
        const auto copy = next++;
        if (!covers(w.host, copy->stream, copy->position)) continue;
        if (copy->to_host) {
            alias_of(copy->host).copy_(copy->staged);
        } else {
            check_source(*copy);
        }
        w.over.splice(w.over.end(), w.copies, copy);
    }
}

void note_sync(const char* kind) {
    const std::string place = where();
    doing = std::string(kind) + " at " + place;
    Locked lock;
    world().syncs.emplace_back(kind, place);
}

void synchronize(const char* kind, int key) {
    note_sync(kind);
    Locked lock;
    Queue& queue = queue_of(key);
    advance(queue, queue.issued);
    host_reaches(queue.clock);
    raise_reports();
}

// ---------------------------------------------------------------- the guard
c10::DeviceIndex visible_devices() {
    static const char* const wanted = std::getenv("LAG_DEVICES");
    static const int count = wanted ? std::clamp(std::atoi(wanted), 1, kDevices) : kDevices;
    return static_cast<c10::DeviceIndex>(count);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
    c10::DeviceType type() const override { return kLag; }
    c10::DeviceIndex deviceCount() const noexcept override { return visible_devices(); }
    c10::Device getDevice() const override { return {kLag, static_cast<c10::DeviceIndex>(current_device)}; }

    void setDevice(c10::Device device) const override {
        TORCH_CHECK(device.type() == kLag && index_of(device) < visible_devices(), "there is no device ", device);
        current_device = index_of(device);
    }

    void uncheckedSetDevice(c10::Device device) const noexcept override { current_device = index_of(device); }

    c10::Device exchangeDevice(c10::Device device) const override {
        const c10::Device before = getDevice();
        setDevice(device);
        return before;
    }

    static c10::Stream stream(int device, int64_t id) {
        return c10::Stream(c10::Stream::UNSAFE, {kLag, static_cast<c10::DeviceIndex>(device)}, id);
    }

    c10::Stream getStream(c10::Device device) const override {
        return stream(index_of(device), current_stream[index_of(device)]);
    }

    c10::Stream getDefaultStream(c10::Device device) const override { return stream(index_of(device), 0); }

    c10::Stream getNewStream(c10::Device device, int /*priority*/) const override {
        Locked lock;
        return stream(index_of(device), 1 + world().streams_made[index_of(device)]++ % kPool);
    }

    c10::Stream getStreamFromGlobalPool(c10::Device device, bool /*high_priority*/) const override {
        return getNewStream(device, 0);
    }

    c10::Stream exchangeStream(c10::Stream stream) const override {
        const c10::Stream before = getStream(stream.device());
        current_stream[index_of(stream.device())] = static_cast<int>(stream.id());
        return before;
    }

    void* getStreamNativeHandle(const c10::Stream stream) const override {
        Locked lock;
        return &queue_of(key_of(stream));
    }

    bool queryStream(const c10::Stream& stream) const override {
        Locked lock;
        const Queue& queue = queue_of(key_of(stream));
        return query(queue.key, queue.issued, queue.clock);
    }

    void synchronizeStream(const c10::Stream& stream) const override {
        lag::synchronize("stream.synchronize", key_of(stream));
    }

    void synchronizeDevice(const c10::DeviceIndex device) const override {
        note_sync("device.synchronize");
        Locked lock;
        for (int id = 0; id <= kPool; ++id) {
            Queue& queue = queue_of(key_of(device, id));
            advance(queue, queue.issued);
            host_reaches(queue.clock);
        }
        raise_reports();
    }

    void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
        Locked lock;
        if (*event == nullptr) *event = new Event;
        const Queue& queue = queue_of(key_of(stream));
        *static_cast<Event*>(*event) = {queue.key, queue.issued, queue.clock, std::chrono::steady_clock::now()};
        let_run();
    }

    void block(void* event, const c10::Stream& stream) const override {
        if (event == nullptr) return;  // never recorded
        Locked lock;
        const Event& e = *static_cast<Event*>(event);
        make_wait(queue_of(key_of(stream)), e.stream, e.position, e.clock);
    }

    bool queryEvent(void* event) const override {
        if (event == nullptr) return true;
        Locked lock;
        const Event& e = *static_cast<Event*>(event);
        return query(e.stream, e.position, e.clock);
    }

    void synchronizeEvent(void* event) const override {
        if (event == nullptr) return;
        note_sync("event.synchronize");
        Locked lock;
        const Event& e = *static_cast<Event*>(event);
        advance(queue_of(e.stream), e.position);
        host_reaches(e.clock);
        raise_reports();
    }

    void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
        delete static_cast<Event*>(event);
    }

    double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
        TORCH_CHECK(first != nullptr && second != nullptr, "both events must be recorded");
        const auto time = static_cast<Event*>(second)->time - static_cast<Event*>(first)->time;
        return std::chrono::duration<double, std::milli>(time).count();
    }

    void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override;

private:
    // Who asks again and again is let on: every question that is answered by no runs one task.
    static bool query(int key, int64_t position, const Clock& clock) {
        Queue& queue = queue_of(key);
        if (queue.done < position) {
            advance(queue, queue.done + 1);
            return false;
        }
        host_reaches(clock);
        raise_reports();
        return true;
    }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// ---------------------------------------------------------------- memory
void free_block(void* context);

Block* block_of(const c10::DataPtr& data) { return data.cast_context<Block>(&free_block); }

Block* block_of(const at::Tensor& tensor) { return block_of(tensor.storage().data_ptr()); }

void use(const at::Tensor& tensor, const Queue& queue) {
    if (Block* block = block_of(tensor)) block->uses[queue.key] = queue.issued;
}

// Whoever takes the block next may write to it on the stream that it was taken on.
void check_free(const Block& block) {
    const Clock& clock = queue_of(block.stream).clock;
    for (const auto& [stream, position] : block.uses) {
        if (stream == block.stream || block.recorded.count(stream)) continue;
        if (covers(clock, stream, position) || covers(world().host, stream, position)) continue;
        report("a block of " + std::to_string(block.nbytes) + " bytes, taken on " + name_of(block.stream) +
               ", was freed while " + name_of(stream) +
               " may still use it: neither the former nor the host has waited, and nobody called record_stream");
    }
}

void free_block(void* context) {
    Block* const block = static_cast<Block*>(context);
    if (block == nullptr) return;
    Locked lock;
    check_free(*block);
    // What is still queued runs before the memory goes: a schedule may do that at any time.
    for (const auto& [stream, position] : block->uses) advance(queue_of(stream), position);
    auto& stats = world().stats[block->device];
    stats.allocated_bytes[0].decrease(block->nbytes);
    stats.allocation[0].decrease(1);
    std::memset(block->data, kPoison, block->nbytes);
    std::free(block->data);
    delete block;
}

struct Allocator final : c10::DeviceAllocator {
    c10::DataPtr allocate(size_t nbytes) override {
        const c10::Device device{kLag, static_cast<c10::DeviceIndex>(current_device)};
        if (nbytes == 0) return {nullptr, nullptr, &free_block, device};
        Locked lock;
        auto& stats = world().stats[current_device];
        const size_t limit = world().memory_limit, held = stats.allocated_bytes[0].current;
        if (limit != 0 && held + nbytes > limit) {
            ++stats.num_ooms;
            // In CUDA's words: accelerate knows the error by them.
            TORCH_CHECK_WITH(OutOfMemoryError, false, "lag out of memory. Tried to allocate ", nbytes, " bytes on lag:",
                             current_device, ", where ", held, " of ", limit, " are in use");
        }
        const int stream = current_key(current_device);
        auto* block = new Block{nullptr, nbytes, current_device, stream, {}, {}};
        TORCH_CHECK(posix_memalign(&block->data, kAlignment, nbytes) == 0, "the host is out of memory");
        std::memset(block->data, kPoison, nbytes);
        stats.allocated_bytes[0].increase(nbytes);
        stats.allocation[0].increase(1);
        ++stats.num_device_alloc;
        return {block->data, block, &free_block, device};
    }

    void copy_data(void* to, const void* from, size_t nbytes) const override { default_copy_data(to, from, nbytes); }
    bool initialized() override { return true; }
    void emptyCache(c10::MempoolId_t /*pool*/) override {}

    void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
        Locked lock;
        if (Block* block = block_of(data)) block->recorded.insert(key_of(stream));
    }

    c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
        Locked lock;
        auto stats = world().stats[device];
        stats.reserved_bytes = stats.allocated_bytes;  // nothing is kept back
        return stats;
    }

    void resetAccumulatedStats(c10::DeviceIndex device) override {
        Locked lock;
        world().stats[device].allocated_bytes[0].reset_accumulated();
    }

    void resetPeakStats(c10::DeviceIndex device) override {
        Locked lock;
        world().stats[device].allocated_bytes[0].reset_peak();
    }

    std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
        Locked lock;
        const size_t total = world().memory_limit != 0 ? world().memory_limit : size_t{1} << 34;
        return {total - std::min<size_t>(total, world().stats[device].allocated_bytes[0].current), total};
    }
};

Allocator& allocator() {
    static Allocator* const only = new Allocator;
    return *only;
}

REGISTER_ALLOCATOR(kLag, &allocator())

void Guard::recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const {
    allocator().recordStream(data, stream);
}

// ---------------------------------------------------------------- pinned memory
size_t pinned_bytes() {
    Locked lock;
    size_t sum = 0;
    for (const auto& [start, nbytes] : world().pinned) sum += nbytes;
    return sum;
}

size_t pinned_ranges() {
    Locked lock;
    return world().pinned.size();
}

void register_pinned(uintptr_t start, size_t nbytes) {
    Locked lock;
    const size_t limit = world().pinned_limit, held = pinned_bytes();
    TORCH_CHECK(limit == 0 || held + nbytes <= limit, "lag: ", nbytes, " bytes of host memory cannot be pinned: ",
                held, " of ", limit, " are");
    const auto next = world().pinned.lower_bound(start);
    const auto end = [](const auto& range) { return range.first + range.second; };
    const bool is_free = (next == world().pinned.end() || next->first >= start + nbytes) &&
                         (next == world().pinned.begin() || end(*std::prev(next)) <= start);
    TORCH_CHECK(is_free, "lag: a part of this host memory is pinned already");
    world().pinned[start] = nbytes;
}

void unregister_pinned(uintptr_t start) {
    Locked lock;
    const auto range = world().pinned.find(start);
    TORCH_CHECK(range != world().pinned.end(), "lag: no pinned host memory starts here");
    for (const HostCopy& copy : world().copies) {
        const auto at = reinterpret_cast<uintptr_t>(copy.host.const_data_ptr());
        if (at >= start && at < start + range->second) report("host memory was unpinned under " + copy.name);
    }
    world().pinned.erase(range);
}

bool is_pinned(const void* data) {
    Locked lock;
    const auto at = reinterpret_cast<uintptr_t>(data);
    const auto next = world().pinned.upper_bound(at);
    return next != world().pinned.begin() && at < std::prev(next)->first + std::prev(next)->second;
}

void free_pinned(void* data) {
    if (data == nullptr) return;
    unregister_pinned(reinterpret_cast<uintptr_t>(data));
    std::free(data);
}

struct PinnedAllocator final : at::HostAllocator {
    c10::DataPtr allocate(size_t nbytes) override {
        void* data = nullptr;
        if (nbytes != 0) {
            TORCH_CHECK(posix_memalign(&data, kAlignment, nbytes) == 0, "the host is out of memory");
            try {
                register_pinned(reinterpret_cast<uintptr_t>(data), nbytes);
            } catch (...) {
                std::free(data);
                throw;
            }
            std::memset(data, kPoison, nbytes);
        }
        return {data, data, &free_pinned, c10::Device(c10::kCPU)};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
    void copy_data(void* to, const void* from, size_t nbytes) const override { default_copy_data(to, from, nbytes); }
    bool record_event(void*, void*, c10::Stream) override { return true; }
    void empty_cache() override {}
    at::HostStats get_stats() override { return {}; }
    void reset_accumulated_stats() override {}
    void reset_peak_stats() override {}
};

PinnedAllocator& pinned_allocator() {
    static PinnedAllocator* const only = new PinnedAllocator;
    return *only;
}

REGISTER_HOST_ALLOCATOR(kLag, &pinned_allocator())

// ---------------------------------------------------------------- generators and hooks
// Where an operation names no generator, the CPU's own default one is used: numbers are those of the CPU.
struct Generator final : at::CPUGeneratorImpl {
    explicit Generator(int device) { move_to({kLag, static_cast<c10::DeviceIndex>(device)}); }

    void move_to(c10::Device device) {
        device_ = device;
        key_set_ = c10::DispatchKeySet(device.is_cpu() ? c10::DispatchKey::CPU : c10::DispatchKey::PrivateUse1);
    }

private:
    CPUGeneratorImpl* clone_impl() const override {
        auto* copy = new Generator(device_.index());
        copy->set_state(*get_state());
        return copy;
    }
};

struct Hooks final : at::PrivateUse1HooksInterface {
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
    c10::DeviceIndex deviceCount() const override { return visible_devices(); }
    c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(current_device); }
    void setCurrentDevice(c10::DeviceIndex device) const override { Guard().setDevice({kLag, device}); }

    c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
        return Guard().exchangeDevice({kLag, device}).index();
    }

    c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
    bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
    c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }

    const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
        static const std::vector<at::Generator> defaults = [] {
            std::vector<at::Generator> made;
            for (int index = 0; index < kDevices; ++index) made.push_back(at::make_generator<Generator>(index));
            return made;
        }();
        return defaults.at(device < 0 ? current_device : device);
    }

    at::Generator getNewGenerator(c10::DeviceIndex device) const override {
        return at::make_generator<Generator>(device < 0 ? current_device : device);
    }

    void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
        const c10::DeviceGuard guard(storage.device());
        Locked lock;
        const size_t kept = std::min(nbytes, storage.nbytes());
        if (kept != 0) begin_operation(current_device);
        c10::DataPtr data = allocator().allocate(nbytes);
        if (kept != 0) std::memcpy(data.get(), storage.data(), kept);
        storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
        storage.unsafeGetStorageImpl()->set_nbytes(nbytes);
    }
};

// ---------------------------------------------------------------- copies
bool is_lag(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kLag; }

// The same elements, as the CPU's. Owns nothing.
at::Tensor alias_of(const at::Tensor& tensor) {
    const size_t needed = at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.element_size(),
                                                           tensor.storage_offset());
    TORCH_CHECK(tensor.numel() == 0 || needed <= tensor.storage().nbytes(), "lag: a tensor of ", tensor.sizes(),
                " is used while its storage has ", tensor.storage().nbytes(), " of ", needed, " bytes");
    return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), at::TensorOptions(tensor.dtype()));
}

// Operations of the CPU that a kernel of this device makes: no autograd, and no copy in them is the program's.
class Inside {
public:
    Inside() { ++depth; }
    ~Inside() { --depth; }
    static bool any() { return depth != 0; }

private:
    static thread_local int depth;
    at::AutoDispatchBelowADInplaceOrView below_autograd_;
};
thread_local int Inside::depth = 0;

void copy_now(const at::Tensor& from, const at::Tensor& to) {
    const Inside inside;
    alias_of(to).copy_(alias_of(from));
}

void copy_on_device(const at::Tensor& from, const at::Tensor& to) {
    Locked lock;
    Queue& queue = begin_operation(to.device().index());
    use(to, queue);
    if (from.device() != to.device()) {  // both streams wait for each other, as on CUDA
        Queue& other = begin_operation(from.device().index());
        join(queue.clock, other.clock);
        join(other.clock, queue.clock);
        use(from, other);
    }
    use(from, queue);
    copy_now(from, to);
}

HostCopy& add_copy(at::Tensor&& host, const at::Tensor& on_device, bool to_host, const std::string& place) {
    Queue& queue = current_queue(on_device.device().index());
    HostCopy& copy = world().copies.emplace_back();
    copy.stream = queue.key;
    copy.position = queue.issued + 1;
    copy.to_host = to_host;
    copy.host = std::move(host);
    copy.name = "a copy of " + std::to_string(copy.host.nbytes()) + " bytes " + (to_host ? "to" : "from") +
                " pinned memory on " + name_of(queue.key) + ", issued at " + place;
    return copy;
}

// A copy to the host may overwrite what an earlier one reads, if its stream knows that one to be over.
void settle_readers(const at::Tensor& host, Queue& queue) {
    World& w = world();
    for (HostCopy& copy : w.copies) {
        if (copy.to_host || !overlap(copy.host, host)) continue;
        advance(queue, queue.issued);
        if (copy.has_run && (covers(queue.clock, copy.stream, copy.position))) {
            check_source(copy);
            copy.is_checked = false;
        }
    }
}

void queue_to_host(const at::Tensor& from, const at::Tensor& host) {
    const std::string place = where();
    at::Tensor kept = host;
    Locked lock;
    Queue& queue = current_queue(from.device().index());
    settle_readers(host, queue);
    std::memset(host.data_ptr(), kPoison, host.nbytes());
    HostCopy& copy = add_copy(std::move(kept), from, true, place);
    issue(queue, [&copy, source = alias_of(from)] {
        const Inside inside;
        copy.staged = source.clone();
        copy.has_run = true;
    });
    use(from, queue);
    let_run();
}

// Brings to the host memory what copies that have run will bring: the device may read it before the host may.
bool deliver_under(const at::Tensor& host) {
    bool any = false;
    for (const HostCopy& copy : world().copies) {
        if (!copy.to_host || !overlap(copy.host, host)) continue;
        any = true;
        if (copy.has_run) alias_of(copy.host).copy_(copy.staged);
    }
    return any;
}

void queue_to_device(const at::Tensor& host, const at::Tensor& to) {
    const std::string place = where();
    at::Tensor kept = host;
    Locked lock;
    Queue& queue = current_queue(to.device().index());
    bool is_written = false;  // by a copy to the host that the host has not waited for: it cannot be checked
    for (const HostCopy& other : world().copies) is_written |= other.to_host && overlap(other.host, host);
    HostCopy& copy = add_copy(std::move(kept), to, false, place);
    copy.is_checked = !is_written;
    if (copy.is_checked) copy.checksum = checksum_of(host);
    issue(queue, [&copy, target = alias_of(to)] {
        const Inside inside;
        if (!deliver_under(copy.host)) check_source(copy);
        target.copy_(alias_of(copy.host));
        copy.has_run = true;
    });
    use(to, queue);
    let_run();
}

void copy_and_wait(const at::Tensor& from, const at::Tensor& to) {
    const at::Tensor& on_device = is_lag(to) ? to : from;
    const int device = on_device.device().index();
    synchronize("copy", current_key(device));
    Locked lock;
    Queue& queue = begin_operation(device);
    use(on_device, queue);
    host_reaches(queue.clock);
    copy_now(from, to);
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
    if (to.numel() == 0) return to;
    const at::Tensor from = self.expand_as(to);
    if (Inside::any()) {
        copy_now(from, to);
        return to;
    }
    raise_reports();
    if (is_lag(from) && is_lag(to)) {
        copy_on_device(from, to);
        return to;
    }
    const at::Tensor& host = is_lag(to) ? from : to;
    if (!non_blocking || !is_pinned(host.const_data_ptr()) || !host.is_non_overlapping_and_dense()) {
        copy_and_wait(from, to);
    } else if (from.scalar_type() != to.scalar_type()) {  // converted on the device
        const auto on_device = is_lag(to) ? to.device() : from.device();
        const at::Tensor between =
            at::empty_like(from, at::TensorOptions(is_lag(to) ? from.dtype() : to.dtype()).device(on_device));
        copy_from(from, between, true);
        copy_from(between, to, true);
    } else if (is_lag(to)) {
        queue_to_device(from, to);
    } else {
        queue_to_host(from, to);
    }
    return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
    if (self.sizes() != to.sizes()) to.resize_(self.sizes());
    return copy_from(self, to, false);
}

// ---------------------------------------------------------------- operations of its own
at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
    const c10::OptionalDeviceGuard guard(device);
    return at::detail::empty_generic(size, &allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                     c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
    const c10::OptionalDeviceGuard guard(device);
    return at::detail::empty_strided_generic(size, stride, &allocator(),
                                             c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                             c10::dtype_or_default(dtype));
}

const at::Tensor& resize(const at::Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
    const c10::DeviceGuard guard(self.device());
    Locked lock;
    begin_operation(current_device);
    return at::native::resize_(self, size, format);
}

at::Tensor& set_storage(at::Tensor& self, at::Storage storage) { return at::native::set_(self, storage); }

at::Tensor& set_empty(at::Tensor& self) {
    const at::Storage storage(c10::Storage::use_byte_size_t(), 0, allocator().allocate(0), &allocator(), true);
    return at::native::set_storage_cpu_(self, storage, 0, {0}, {});
}

at::Scalar local_scalar(const at::Tensor& self) {
    if (!Inside::any()) synchronize("item", current_key(self.device().index()));
    return at::native::_local_scalar_dense_cpu(alias_of(self));
}

void record_stream(at::Tensor& self, c10::Stream stream) {
    allocator().recordStream(self.storage().data_ptr(), stream);
}

// ---------------------------------------------------------------- all other operations
// The shape of what they return depends on values, so the host waits for them.
const std::set<std::string_view> kShapedByValues = {
    "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive",
    "aten::repeat_interleave", "aten::bincount"};
// Take indices of the CPU's, as on CUDA.
const std::set<std::string_view> kTakesHostIndices = {"aten::index", "aten::index_put_", "aten::_index_put_impl_"};

bool host_waits_for(const c10::FunctionSchema& schema) {
    if (kShapedByValues.count(schema.name())) return true;
    for (const auto& result : schema.returns())
        if (result.type()->kind() == c10::TypeKind::BoolType || result.type()->kind() == c10::TypeKind::NumberType)
            return true;
    return false;
}

// The tensors of a call that are on the device, and a refusal of those that are not.
struct Operands {
    std::vector<at::Tensor> on_device;
    std::optional<c10::Device> elsewhere;

    void add(const at::Tensor& tensor, bool may_be_number) {
        if (!tensor.defined()) return;
        const bool is_other = !is_lag(tensor) || (!on_device.empty() && tensor.device() != on_device[0].device());
        if (is_other && !(may_be_number && tensor.device().is_cpu() && tensor.dim() == 0)) elsewhere = tensor.device();
        if (is_lag(tensor)) on_device.push_back(tensor);
    }
};

Operands operands_of(const c10::FunctionSchema& schema, const torch::jit::Stack& stack) {
    Operands found;
    const size_t count = schema.arguments().size();
    for (size_t i = stack.size() - count; i < stack.size(); ++i) {
        const c10::IValue& value = stack[i];
        if (value.isTensor()) {
            found.add(value.toTensor(), true);
        } else if (value.isTensorList()) {
            for (const at::Tensor& tensor : value.toTensorVector()) found.add(tensor, false);
        } else if (value.isOptionalTensorList() && !kTakesHostIndices.count(schema.name())) {
            for (const auto& tensor : value.toOptionalTensorVector())
                if (tensor.has_value()) found.add(*tensor, false);
        }
    }
    return found;
}

// The CPU's kernels accept generators of the CPU only.
class BorrowedGenerators {
public:
    BorrowedGenerators(torch::jit::Stack& stack, size_t count) {
        for (size_t i = stack.size() - count; i < stack.size(); ++i) {
            if (!stack[i].isGenerator()) continue;
            const at::Generator generator = stack[i].toGenerator();
            if (generator.defined() && generator.device().type() == kLag) borrowed_.push_back(generator);
        }
        for (at::Generator& generator : borrowed_) {
            devices_.push_back(generator.device());
            generator.get<Generator>()->move_to(c10::Device(c10::kCPU));
        }
    }
    ~BorrowedGenerators() {
        for (size_t i = 0; i < borrowed_.size(); ++i) borrowed_[i].get<Generator>()->move_to(devices_[i]);
    }

private:
    std::vector<at::Generator> borrowed_;
    std::vector<c10::Device> devices_;
};

// torch's own fallback leaves results on the CPU where the first operand is a number there.
void move_results(torch::jit::Stack& stack, size_t count, c10::Device device) {
    for (size_t i = stack.size() - count; i < stack.size(); ++i)
        if (stack[i].isTensor() && stack[i].toTensor().defined() && stack[i].toTensor().device().is_cpu())
            stack[i] = stack[i].toTensor().to(device);
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    const c10::FunctionSchema& schema = op.schema();
    doing = schema.name();
    raise_reports();
    const Operands operands = operands_of(schema, *stack);
    if (operands.on_device.empty()) {
        const Inside inside;
        at::native::cpu_fallback(op, stack);
        return;
    }
    const c10::Device device = operands.on_device[0].device();
    TORCH_CHECK(!operands.elsewhere, "lag: Expected all tensors to be on the same device, but found ", device, " and ",
                *operands.elsewhere, " in ", schema.name());
    const c10::DeviceGuard guard(device);
    if (!Inside::any() && host_waits_for(schema))
        synchronize(schema.name().c_str(), current_key(device.index()));
    {
        Locked lock;
        const Queue& queue = begin_operation(device.index());
        for (const at::Tensor& tensor : operands.on_device) use(tensor, queue);
    }
    const Inside inside;
    const BorrowedGenerators generators(*stack, schema.arguments().size());
    at::native::cpu_fallback(op, stack, /*error_on_views=*/true);
    move_results(*stack, schema.returns().size(), device);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
    library.impl("empty.memory_format", empty);
    library.impl("empty_strided", empty_strided);
    library.impl("as_strided", at::native::as_strided_tensorimpl);
    library.impl("view", at::native::view);
    library.impl("_reshape_alias", at::native::_reshape_alias);
    library.impl("unfold", at::native::unfold);
    library.impl("resize_", resize);
    library.impl("set_", set_empty);
    library.impl("set_.source_Storage", set_storage);
    library.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
    library.impl("set_.source_Tensor", at::native::set_tensor_);
    library.impl("_copy_from", copy_from);
    library.impl("_copy_from_and_resize", copy_from_and_resize);
    library.impl("_local_scalar_dense", local_scalar);
    library.impl("record_stream", record_stream);
}

// These have a decomposition for devices without a kernel; the CPU's own kernels round otherwise.
TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
    for (const char* name : {"native_layer_norm", "native_group_norm", "silu_backward", "mish_backward"})
        library.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
    library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

// ---------------------------------------------------------------- collectives
using Gloo = c10::intrusive_ptr<c10d::Backend>;
using Transfer = std::function<c10::intrusive_ptr<c10d::Work>(at::Tensor& in, at::Tensor& out)>;
using Finish = std::function<void(at::Tensor& out)>;

// How long a group whose ranks have died may take until it is aborted.
constexpr std::chrono::seconds kAbortTakes{30};

// Groups that were aborted, for good. Has a lock of its own: a collective that runs holds the other one.
class Aborted {
public:
    void add(const Gloo& gloo) {
        const std::lock_guard<std::mutex> lock(mutex_);
        groups_.push_back(gloo);  // kept: its threads may wait until their timeout, for which its destructor would wait
    }
    bool has(const Gloo& gloo) {
        const std::lock_guard<std::mutex> lock(mutex_);
        return std::find(groups_.begin(), groups_.end(), gloo) != groups_.end();
    }

private:
    std::mutex mutex_;
    std::vector<Gloo> groups_;
};

Aborted& aborted() {
    static Aborted* const only = new Aborted;
    return *only;
}

// Runs `transfer`. Ends with the group as well, as an abort ends the kernels that wait for other ranks: false then.
// A rank that dies makes gloo fail, but kernels go on waiting: so this does, for as long as an abort may take.
bool transfers(const char* name, const Transfer& transfer, at::Tensor& from, at::Tensor& to, const Gloo& gloo) {
    const auto deadline = std::chrono::steady_clock::now() + kAbortTakes;
    std::string error;
    c10::intrusive_ptr<c10d::Work> work;
    if (aborted().has(gloo)) return false;
    try {
        work = transfer(from, to);
    } catch (const std::exception& raised) {
        error = raised.what();
    }
    while (error.empty() && !aborted().has(gloo)) {
        if (work->isCompleted()) {
            if (work->isSuccess()) return true;
            try {
                work->wait();
            } catch (const std::exception& raised) {
                error = raised.what();
            }
        }
        std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    while (!aborted().has(gloo)) {
        if (std::chrono::steady_clock::now() > deadline) {
            report(std::string(name) + " failed: " + error.substr(0, 500));
            break;
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    new auto(std::make_tuple(transfer, work, from, to));  // gloo's threads may use all of it
    return false;
}

// What `out` holds until the collective is over. Part of it may be the input of the collective, which stays.
void poison_output(const at::Tensor& in, const at::Tensor& out, const at::Tensor& kept) {
    std::memset(out.data_ptr(), kPoison, out.nbytes());
    if (kept.defined() && in.nbytes() < out.nbytes()) in.copy_(kept);
}

// Queues `transfer` of every pair, which goes through host memory, as one task of a stream that first waits for the
// current one. `finish` makes the output of what was received.
void queue_collective(const char* name, const Gloo& gloo, int stream, const std::vector<at::Tensor>& inputs,
                      const std::vector<at::Tensor>& outputs, bool poisons, Transfer transfer, Finish finish = nullptr) {
    raise_reports();
    doing = name;
    TORCH_CHECK(!inputs.empty() && inputs.size() == outputs.size(), "lag: ", name, " takes as many inputs as outputs");
    for (size_t i = 0; i < inputs.size(); ++i)
        TORCH_CHECK(is_lag(inputs[i]) && is_lag(outputs[i]) && inputs[i].is_contiguous() && outputs[i].is_contiguous(),
                    "lag: ", name, " takes contiguous tensors of the device");
    Locked lock;
    world().has_collectives = calls_collectives = true;
    const Inside inside;
    Queue& current = begin_operation(outputs[0].device().index());
    Queue& queue = queue_of(key_of(outputs[0].device().index(), stream));
    make_wait(queue, current.key, current.issued, current.clock);
    std::vector<std::array<at::Tensor, 3>> pairs;  // input, output, a copy of an input that lies in its output
    for (size_t i = 0; i < inputs.size(); ++i) {
        const at::Tensor in = alias_of(inputs[i]), out = alias_of(outputs[i]);
        const at::Tensor kept = overlap(in, out) ? in.clone() : at::Tensor();
        if (poisons) poison_output(in, out, kept);
        pairs.push_back({in, out, kept});
    }
    issue(queue, [name, pairs, transfer, finish, gloo] {
        const Inside inside;
        for (const auto& [in, out, kept] : pairs) {
            at::Tensor from = kept.defined() ? kept : in.clone();
            at::Tensor to = in.nbytes() == out.nbytes() && kept.defined() ? from : at::empty_like(out);
            if (!transfers(name, transfer, from, to, gloo)) return;
            if (finish) finish(to);
            out.copy_(to);
        }
    });
    for (const auto* tensors : {&inputs, &outputs})
        for (const at::Tensor& tensor : *tensors) use(tensor, queue);
    let_run();
}

void all_gather(const Gloo& gloo, int stream, const std::vector<at::Tensor>& outs,
                const std::vector<at::Tensor>& ins) {
    queue_collective("all_gather", gloo, stream, ins, outs, true,
                     [gloo](at::Tensor& from, at::Tensor& to) { return gloo->_allgather_base(to, from); });
}

void reduce_scatter(const Gloo& gloo, int stream, const std::vector<at::Tensor>& outs,
                    const std::vector<at::Tensor>& ins, const c10d::ReduceScatterOptions& options) {
    TORCH_CHECK(options.reduceOp == c10d::ReduceOp::SUM, "lag: reduce_scatter sums");
    // In rank order, as hf_zero sums on the CPU: gloo's own rounds at every hop.
    const auto parts = std::make_shared<at::Tensor>();
    queue_collective(
        "reduce_scatter", gloo, stream, ins, outs, true,
        [gloo, parts](at::Tensor& from, at::Tensor&) {
            *parts = at::empty_like(from);
            std::vector<int64_t> equal;
            return gloo->alltoall_base(*parts, from, equal, equal);
        },
        [gloo, parts](at::Tensor& to) { at::sum_out(to, parts->view({gloo->getSize(), -1}), {0}); });
}

void all_to_all(const Gloo& gloo, int stream, const at::Tensor& out, const at::Tensor& in,
                std::vector<int64_t> received, std::vector<int64_t> sent) {
    queue_collective("all_to_all", gloo, stream, {in}, {out}, true,
                     [gloo, received, sent](at::Tensor& from, at::Tensor& to) mutable {
                         return gloo->alltoall_base(to, from, received, sent);
                     });
}

void all_reduce(const Gloo& gloo, int stream, const std::vector<at::Tensor>& all,
                const c10d::AllreduceOptions& options) {
    queue_collective("all_reduce", gloo, stream, all, all, true, [gloo, options](at::Tensor&, at::Tensor& to) {
        std::vector<at::Tensor> tensors{to};
        return gloo->allreduce(tensors, options);
    });
}

void broadcast(const Gloo& gloo, int stream, const at::Tensor& tensor, const c10d::BroadcastOptions& options) {
    const bool is_root = gloo->getRank() == options.rootRank;  // may read on
    queue_collective("broadcast", gloo, stream, {tensor}, {tensor}, !is_root,
                     [gloo, options](at::Tensor&, at::Tensor& to) {
        std::vector<at::Tensor> tensors{to};
        return gloo->broadcast(tensors, options);
    });
}

// An aborted group does nothing more, and says nothing of it. It uses no memory any more, as the caller knows.
void drop_tasks(const Gloo& gloo, int device, int stream) {
    aborted().add(gloo);
    Locked lock;
    Queue& queue = queue_of(key_of(device, stream));
    for (auto& task : queue.tasks) task = [] {};
    advance(queue, queue.issued);
    host_reaches({{queue.key, queue.issued}});
}

// ---------------------------------------------------------------- what tests ask for
void set_schedule(const std::string& text) {
    const std::string random = "random:";
    Locked lock;
    World& w = world();
    if (text == "late") {
        w.schedule = Schedule::kLate;
    } else if (text == "early") {
        w.schedule = Schedule::kEarly;
    } else {
        TORCH_CHECK(text.rfind(random, 0) == 0, "lag: schedule ", text, ": expected late, early or random:SEED");
        w.random.seed(std::stoul(text.substr(random.size())));
        w.schedule = Schedule::kRandom;
    }
    let_run();
}

int64_t queued_tasks() {
    Locked lock;
    int64_t count = 0;
    for (const auto& [key, queue] : world().queues) count += queue.issued - queue.done;
    return count;
}

// Runs all that is queued if nobody has called the device since `before`, what the last call here has returned. Without
// it ranks whose tasks ran at different times may wait for each other for ever: one in a collective, the other, which
// has queued it, on the host. A real device runs its tasks by itself.
uint64_t let_a_stalled_device_run(uint64_t before) {
    if (calls_made != before) return calls_made;
    std::lock_guard<std::recursive_mutex> lock(world().mutex);
    if (calls_made == before)
        for (auto& [key, queue] : world().queues) advance(queue, queue.issued);
    return calls_made;
}

std::vector<std::string> take_reports() {
    Locked lock;
    world().raised = 0;
    return std::exchange(world().reports, {});
}

std::vector<std::pair<std::string, std::string>> take_syncs() {
    Locked lock;
    return std::exchange(world().syncs, {});
}

void set_memory_limit(size_t nbytes) {
    Locked lock;
    world().memory_limit = nbytes;
}

void set_pinned_limit(size_t nbytes) {
    Locked lock;
    world().pinned_limit = nbytes;
}

void set_locator(const pybind11::function& function) { locator = pybind11::function(function).release().ptr(); }

void register_hooks() {
    static Hooks* const hooks = new Hooks;
    at::RegisterPrivateUse1HooksInterface(hooks);
}

}  // namespace

PYBIND11_MODULE(lag_native, module) {
    register_hooks();
    module.def("set_schedule", set_schedule);
    module.def("set_memory_limit", set_memory_limit);
    module.def("set_pinned_limit", set_pinned_limit);
    module.def("set_locator", set_locator);
    module.def("queued_tasks", queued_tasks);
    const pybind11::call_guard<pybind11::gil_scoped_release> free;  // others run while the ranks wait for each other
    module.def("register_pinned", register_pinned, free);
    module.def("unregister_pinned", unregister_pinned, free);
    module.def("all_gather", all_gather, free);
    module.def("reduce_scatter", reduce_scatter, free);
    module.def("all_to_all", all_to_all, free);
    module.def("all_reduce", all_reduce, free);
    module.def("broadcast", broadcast, free);
    module.def("drop_tasks", drop_tasks, free);
    module.def("let_a_stalled_device_run", let_a_stalled_device_run, free);
    module.def("visible_devices", visible_devices);
    module.def("pinned_bytes", pinned_bytes, free);
    module.def("pinned_ranges", pinned_ranges, free);
    module.def("take_reports", take_reports);
    module.def("take_syncs", take_syncs);
}

}  // namespace lag
