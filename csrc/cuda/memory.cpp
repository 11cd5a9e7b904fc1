#include "memory.h"

#include <map>

namespace gradwire::cuda {

DeviceScope::DeviceScope(int device) {
    CUDA_TRY(cudaGetDevice(&before_));
    if (before_ == device) return;
    CUDA_TRY(cudaSetDevice(device));
    changed_ = true;
}

DeviceScope::~DeviceScope() {
    if (changed_ && cudaSetDevice(before_) != cudaSuccess) cudaGetLastError();
}

DeviceMemory<uint8_t> allocate_device(uint64_t bytes) {
    void* memory = nullptr;
    CUDA_TRY(cudaMalloc(&memory, bytes));
    return DeviceMemory<uint8_t>(static_cast<uint8_t*>(memory));
}

PinnedMemory<uint8_t> allocate_pinned(uint64_t bytes) {
    void* memory = nullptr;
    CUDA_TRY(cudaMallocHost(&memory, bytes));
    return PinnedMemory<uint8_t>(static_cast<uint8_t*>(memory));
}

namespace {

// Return the pool of the current device, which exists until the end of the process.
cudaMemPool_t stream_pool() {
    static std::mutex mutex;
    static std::map<int, cudaMemPool_t> pools;
    int device = 0;
    CUDA_TRY(cudaGetDevice(&device));
    const std::lock_guard<std::mutex> lock(mutex);
    const auto known = pools.find(device);
    if (known != pools.end()) return known->second;
    cudaMemPoolProps properties{};
    properties.allocType = cudaMemAllocationTypePinned;
    properties.location.type = cudaMemLocationTypeDevice;
    properties.location.id = device;
    cudaMemPool_t pool = nullptr;
    CUDA_TRY(cudaMemPoolCreate(&pool, &properties));
    uint64_t keeps = UINT64_MAX;
    CUDA_TRY(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &keeps));
    pools[device] = pool;
    return pool;
}

bool is_capturing(cudaStream_t stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    CUDA_TRY(cudaStreamIsCapturing(stream, &status));
    return status != cudaStreamCaptureStatusNone;
}

// The free slots of one device.
struct SlotList {
    std::mutex mutex;
    std::vector<std::unique_ptr<StatusSlot>> free;
};

SlotList& slots_of(int device) {
    static std::mutex mutex;
    static auto& lists = *new std::map<int, SlotList>;  // outlives every message
    const std::lock_guard<std::mutex> lock(mutex);
    return lists[device];
}

// Return a slot whose last use is over, or a new one.
std::unique_ptr<StatusSlot> acquire_slot(int device) {
    SlotList& list = slots_of(device);
    const std::lock_guard<std::mutex> lock(list.mutex);
    for (std::unique_ptr<StatusSlot>& free : list.free) {
        if (cudaEventQuery(free->used) != cudaSuccess) {
            cudaGetLastError();  // clears "not ready", which the runtime keeps as an error
            continue;
        }
        std::swap(free, list.free.back());
        std::unique_ptr<StatusSlot> slot = std::move(list.free.back());
        list.free.pop_back();
        *slot->status = {};
        return slot;
    }
    auto slot = std::make_unique<StatusSlot>();
    slot->memory = allocate_pinned(sizeof(MessageStatus));
    slot->status = reinterpret_cast<MessageStatus*>(slot->memory.get());
    *slot->status = {};
    CUDA_TRY(cudaEventCreateWithFlags(&slot->used, cudaEventDisableTiming));
    return slot;
}

// `device` is the current device.
std::unique_ptr<MessageBuffer> make_buffer(int device) {
    auto buffer = std::make_unique<MessageBuffer>();
    buffer->device = device;
    buffer->slot = acquire_slot(device);
    buffer->status = buffer->slot->status;
    buffer->used = buffer->slot->used;
    return buffer;
}

}  // namespace

StreamMemory::StreamMemory(uint64_t bytes, cudaStream_t stream) : stream_(stream) {
    CUDA_TRY(cudaMallocFromPoolAsync(&memory_, bytes, stream_pool(), stream));
}

StreamMemory::~StreamMemory() {
    if (memory_ && cudaFreeAsync(memory_, stream_) != cudaSuccess) cudaGetLastError();
}

MessageBuffer::~MessageBuffer() {
    if (!slot || captured) {  // a graph may be replayed and write the status again
        static_cast<void>(slot.release());
        return;
    }
    SlotList& list = slots_of(device);
    const std::lock_guard<std::mutex> lock(list.mutex);
    list.free.push_back(std::move(slot));
}

void MessageBuffer::begin_use(cudaStream_t stream) {
    if (is_capturing(stream))
        captured = true;
    else if (!captured)
        CUDA_TRY(cudaStreamWaitEvent(stream, used, 0));
}

void MessageBuffer::end_use(cudaStream_t stream) {
    if (!captured) CUDA_TRY(cudaEventRecord(used, stream));
}

void MessageBuffer::wait() const {
    const DeviceScope scope(device);
    if (captured)
        CUDA_TRY(cudaDeviceSynchronize());
    else
        CUDA_TRY(cudaEventSynchronize(used));
}

std::shared_ptr<MessageBuffer> borrow_buffer(int device, uint8_t* on_device, uint64_t capacity) {
    const DeviceScope scope(device);
    std::shared_ptr<MessageBuffer> buffer = make_buffer(device);
    buffer->on_device = on_device;
    buffer->capacity = capacity;
    return buffer;
}

std::shared_ptr<MessageBuffer> BufferPool::acquire() {
    std::unique_ptr<MessageBuffer> buffer;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (!free_.empty()) {
            buffer = std::move(free_.back());
            free_.pop_back();
        }
    }
    if (!buffer) {
        const DeviceScope scope(device_);
        buffer = make_buffer(device_);
        buffer->own_device = allocate_device(capacity_);
        buffer->own_host = allocate_pinned(capacity_);
        buffer->on_device = buffer->own_device.get();
        buffer->on_host = buffer->own_host.get();
        buffer->capacity = capacity_;
    }
    return {buffer.release(), [pool = shared_from_this()](MessageBuffer* given_back) {
                std::unique_ptr<MessageBuffer> owned(given_back);
                const std::lock_guard<std::mutex> lock(pool->mutex_);
                pool->free_.push_back(std::move(owned));
            }};
}

}  // namespace gradwire::cuda
