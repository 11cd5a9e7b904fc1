// Streams are queues of work that runs as late as allowed: when the host waits for it or for later work. With a seed
// other than 0 some work runs early, at random. As on a device, the host sees results without waiting only by chance.
// Memory ends at a protected page and is initially garbage.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <vector>

#include <sys/mman.h>
#include <unistd.h>

#include "threads.h"

using Work = std::function<void()>;

struct EmulatedGraph {
    std::vector<Work> work;
};
struct Queued {
    Work work;
    bool is_slow = false;  // never runs early
};
struct EmulatedStream {
    std::deque<Queued> queue;
    uint64_t done = 0;
    EmulatedGraph* captures = nullptr;

    uint64_t enqueued() const { return done + queue.size(); }
};
struct EmulatedEvent {
    EmulatedStream* stream = nullptr;
    uint64_t position = 0;
    EmulatedGraph* captured = nullptr;
};
struct EmulatedPool {
    int device;
};

namespace {

constexpr int kDevices = 2;
constexpr int kProcessors = 2;
constexpr size_t kMostBytes = size_t{8} << 30;
constexpr uint8_t kGarbage = 0xcb;

struct Allocation {
    uint8_t* pages;
    size_t bytes;  // with the protected page
    cudaMemoryType type;
    int device;
};

std::recursive_mutex mutex;
std::map<uintptr_t, Allocation> allocations;
std::vector<EmulatedStream*> streams{new EmulatedStream};
cudaError_t last_error = cudaSuccess;
int current_device = 0;
unsigned capturing = 0;
uint64_t waits = 0;
uint64_t copied_bytes = 0;  // all copies of the module are between host and device
bool is_eager = false;

using Lock = std::lock_guard<std::recursive_mutex>;

cudaError_t fail(cudaError_t error) { return last_error = error; }

// 0, 1 and 2 are the default stream. All other streams are non-blocking, so the default stream does not wait for them.
EmulatedStream& stream_of(cudaStream_t stream) {
    return reinterpret_cast<uintptr_t>(stream) <= 2 ? *streams[0] : *stream;
}

void advance(EmulatedStream& stream, uint64_t position) {
    while (stream.done < position && !stream.queue.empty()) {
        const Queued next = std::move(stream.queue.front());
        stream.queue.pop_front();
        ++stream.done;
        next.work();
    }
}

// Run the streams in random turns, because they are independent of each other.
void advance_all() {
    for (;;) {
        std::vector<EmulatedStream*> busy;
        for (EmulatedStream* stream : streams)
            if (!stream->queue.empty()) busy.push_back(stream);
        if (busy.empty()) return;
        EmulatedStream& lucky = *busy[emulated::draw(busy.size())];
        advance(lucky, lucky.done + 1 + emulated::draw(lucky.queue.size()));
    }
}

void advance_some(EmulatedStream& stream) {
    const auto slow =
        std::find_if(stream.queue.begin(), stream.queue.end(), [](const Queued& one) { return one.is_slow; });
    advance(stream, stream.done + emulated::draw(static_cast<uint64_t>(slow - stream.queue.begin()) + 1));
}

void enqueue(EmulatedStream& stream, Work work) {
    if (stream.captures) {
        stream.captures->work.push_back(std::move(work));
        return;
    }
    stream.queue.push_back({std::move(work)});
    if (is_eager && emulated::draw(4) == 0) advance_some(*streams[emulated::draw(streams.size())]);
}

cudaError_t allocate(void** memory, size_t bytes, cudaMemoryType type) {
    if (bytes > kMostBytes) return fail(cudaErrorMemoryAllocation);
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const size_t used = (std::max<size_t>(bytes, 1) + 255) / 256 * 256;
    const size_t mapped = (used + page - 1) / page * page;
    void* pages = mmap(nullptr, mapped + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED) return fail(cudaErrorMemoryAllocation);
    auto* base = static_cast<uint8_t*>(pages);
    mprotect(base + mapped, page, PROT_NONE);
    std::memset(base, kGarbage, mapped);
    uint8_t* begin = base + mapped - used;
    allocations[reinterpret_cast<uintptr_t>(begin)] = {base, mapped + page, type, current_device};
    *memory = begin;
    return cudaSuccess;
}

void release(void* memory) {
    const auto found = allocations.find(reinterpret_cast<uintptr_t>(memory));
    if (found == allocations.end()) return;
    munmap(found->second.pages, found->second.bytes);
    allocations.erase(found);
}

}  // namespace

namespace emulated {

cudaError_t launch(dim3 blocks, dim3 threads, cudaStream_t stream, std::function<void()> kernel) {
    const Lock lock(mutex);
    if (blocks.x == 0 || blocks.y == 0 || blocks.y > 65535 || threads.x == 0 || threads.x > 1024 ||
        (threads.x & (threads.x - 1)) != 0)
        return fail(cudaErrorInvalidConfiguration);
    enqueue(stream_of(stream), [=] { run_grid(blocks, threads, kernel); });
    return cudaSuccess;
}

}  // namespace emulated

// --- devices and errors ---

cudaError_t cudaDriverGetVersion(int* version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int* count) {
    *count = kDevices;
    return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
    *device = current_device;
    return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= kDevices) return fail(cudaErrorInvalidDevice);
    current_device = device;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int device) {
    if (device < 0 || device >= kDevices) return fail(cudaErrorInvalidDevice);
    *value = kProcessors;
    return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
    const Lock lock(mutex);
    if (capturing) return fail(cudaErrorStreamCaptureUnsupported);
    ++waits;
    advance_all();
    return cudaSuccess;
}
cudaError_t cudaGetLastError() {
    const cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}
const char* cudaGetErrorName(cudaError_t error) {
    switch (error) {
        case cudaSuccess: return "cudaSuccess";
        case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
        case cudaErrorInvalidDevice: return "cudaErrorInvalidDevice";
        case cudaErrorInvalidConfiguration: return "cudaErrorInvalidConfiguration";
        case cudaErrorNotReady: return "cudaErrorNotReady";
        case cudaErrorStreamCaptureUnsupported: return "cudaErrorStreamCaptureUnsupported";
        default: return "cudaErrorInvalidValue";
    }
}
const char* cudaGetErrorString(cudaError_t) { return "said by the emulated device"; }

// --- memory ---

cudaError_t cudaMalloc(void** memory, size_t bytes) {
    const Lock lock(mutex);
    if (capturing) return fail(cudaErrorStreamCaptureUnsupported);
    return allocate(memory, bytes, cudaMemoryTypeDevice);
}
cudaError_t cudaMallocHost(void** memory, size_t bytes) {
    const Lock lock(mutex);
    if (capturing) return fail(cudaErrorStreamCaptureUnsupported);
    return allocate(memory, bytes, cudaMemoryTypeHost);
}
cudaError_t cudaFree(void* memory) {
    const Lock lock(mutex);
    if (!memory) return cudaSuccess;
    if (capturing) return fail(cudaErrorStreamCaptureUnsupported);
    ++waits;
    advance_all();
    release(memory);
    return cudaSuccess;
}
cudaError_t cudaFreeHost(void* memory) { return cudaFree(memory); }
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* memory) {
    const Lock lock(mutex);
    const auto address = reinterpret_cast<uintptr_t>(memory);
    *attributes = {cudaMemoryTypeUnregistered, 0};
    const auto behind = allocations.upper_bound(address);
    if (behind == allocations.begin()) return cudaSuccess;
    const Allocation& found = std::prev(behind)->second;
    if (address < reinterpret_cast<uintptr_t>(found.pages) + found.bytes) *attributes = {found.type, found.device};
    return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
    const Lock lock(mutex);
    copied_bytes += bytes;
    enqueue(stream_of(stream), [=] { std::memcpy(to, from, bytes); });
    return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
    const Lock lock(mutex);
    if (capturing) return fail(cudaErrorStreamCaptureUnsupported);
    cudaMemcpyAsync(to, from, bytes, kind, nullptr);
    return cudaStreamSynchronize(nullptr);
}
cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t stream) {
    const Lock lock(mutex);
    enqueue(stream_of(stream), [=] { std::memset(memory, value, bytes); });
    return cudaSuccess;
}
cudaError_t cudaMemset(void* memory, int value, size_t bytes) {
    if (capturing) return fail(cudaErrorStreamCaptureUnsupported);
    return cudaMemsetAsync(memory, value, bytes, nullptr);
}
cudaError_t cudaMemPoolCreate(cudaMemPool_t* pool, const cudaMemPoolProps* properties) {
    *pool = new EmulatedPool{properties->location.id};
    return cudaSuccess;
}
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) { return cudaSuccess; }
cudaError_t cudaMallocFromPoolAsync(void** memory, size_t bytes, cudaMemPool_t, cudaStream_t stream) {
    const Lock lock(mutex);
    const cudaError_t error = allocate(memory, bytes, cudaMemoryTypeDevice);
    if (error != cudaSuccess) return error;
    // The memory may still be in use by earlier work, so it becomes garbage in the order of the stream.
    enqueue(stream_of(stream), [begin = *memory, bytes] { std::memset(begin, kGarbage, bytes); });
    return cudaSuccess;
}
cudaError_t cudaFreeAsync(void* memory, cudaStream_t stream) {
    const Lock lock(mutex);
    EmulatedStream& on = stream_of(stream);
    if (!on.captures) enqueue(on, [=] { release(memory); });  // a graph keeps its allocations
    return cudaSuccess;
}

// --- streams and events ---

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
    const Lock lock(mutex);
    if (flags != cudaStreamNonBlocking) return fail(cudaErrorInvalidValue);
    streams.push_back(*stream = new EmulatedStream);
    return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    const Lock lock(mutex);
    EmulatedStream& on = stream_of(stream);
    if (on.captures) return fail(cudaErrorStreamCaptureUnsupported);
    ++waits;
    advance(on, on.enqueued());
    return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    const Lock lock(mutex);
    EmulatedStream& on = stream_of(stream);
    if (on.captures != event->captured) return fail(cudaErrorStreamCaptureUnsupported);
    if (event->stream && !on.captures)
        enqueue(on, [other = event->stream, position = event->position] { advance(*other, position); });
    return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
    const Lock lock(mutex);
    enqueue(stream_of(stream), [=] { function(data); });
    return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
    const Lock lock(mutex);
    if (capturing) return fail(cudaErrorStreamCaptureUnsupported);
    *event = new EmulatedEvent;
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    const Lock lock(mutex);
    EmulatedStream& on = stream_of(stream);
    *event = {&on, on.enqueued(), on.captures};
    return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
    const Lock lock(mutex);
    if (capturing) return fail(cudaErrorStreamCaptureUnsupported);
    const bool is_done = !event->stream || event->stream->done >= event->position;
    return is_done ? cudaSuccess : fail(cudaErrorNotReady);
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    const Lock lock(mutex);
    if (event->captured) return fail(cudaErrorStreamCaptureUnsupported);
    ++waits;
    if (event->stream) advance(*event->stream, event->position);
    return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
    delete event;
    return cudaSuccess;
}

// --- graphs ---

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
    const Lock lock(mutex);
    *status = stream_of(stream).captures ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, int) {
    const Lock lock(mutex);
    EmulatedStream& on = stream_of(stream);
    if (&on == streams[0] || on.captures) return fail(cudaErrorStreamCaptureUnsupported);
    on.captures = new EmulatedGraph;
    ++capturing;
    return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
    const Lock lock(mutex);
    EmulatedStream& on = stream_of(stream);
    if (!on.captures) return fail(cudaErrorInvalidValue);
    *graph = on.captures;
    on.captures = nullptr;
    --capturing;
    return cudaSuccess;
}
cudaError_t emulatedGraphLaunch(cudaGraph_t graph, cudaStream_t stream) {
    const Lock lock(mutex);
    for (const Work& work : graph->work) enqueue(stream_of(stream), work);
    return cudaSuccess;
}

cudaError_t emulatedSleep(cudaStream_t stream) {
    const Lock lock(mutex);
    stream_of(stream).queue.push_back({[] {}, true});
    return cudaSuccess;
}
uint64_t emulatedWaits() { return waits; }
uint64_t emulatedCopiedBytes() { return copied_bytes; }
cudaError_t emulatedSeed(uint64_t number) {
    emulated::seed(number);
    is_eager = number != 0;
    return cudaSuccess;
}
