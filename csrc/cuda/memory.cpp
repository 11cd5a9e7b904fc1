#include "memory.h"

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

bool is_capturing(cudaStream_t stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    CUDA_TRY(cudaStreamIsCapturing(stream, &status));
    return status != cudaStreamCaptureStatusNone;
}

std::unique_ptr<MessageBuffer> make_buffer(int device) {
    auto buffer = std::make_unique<MessageBuffer>();
    buffer->device = device;
    buffer->own_status = allocate_pinned(sizeof(MessageStatus));
    buffer->status = reinterpret_cast<MessageStatus*>(buffer->own_status.get());
    *buffer->status = {};
    CUDA_TRY(cudaEventCreateWithFlags(&buffer->used, cudaEventDisableTiming));
    return buffer;
}

}  // namespace

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

std::shared_ptr<MessageBuffer> BufferPool::take() {
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
