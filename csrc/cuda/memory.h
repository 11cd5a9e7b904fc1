// Device memory, pinned host memory, and the buffers of messages.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "check.h"

namespace gradwire::cuda {

struct FreeDevice {
    void operator()(void* memory) const { cudaFree(memory); }
};
struct FreePinned {
    void operator()(void* memory) const { cudaFreeHost(memory); }
};
template <class T>
using DeviceMemory = std::unique_ptr<T, FreeDevice>;
template <class T>
using PinnedMemory = std::unique_ptr<T, FreePinned>;

// Both allocate on the current device and throw CudaError.
DeviceMemory<uint8_t> allocate_device(uint64_t bytes);
PinnedMemory<uint8_t> allocate_pinned(uint64_t bytes);

// Memory that is allocated and freed in the order of a stream: no call waits, and a graph can contain it. It comes from
// a pool of this library on the current device, which keeps freed memory. The default pool returns it to the system
// whenever the host waits, and its settings belong to the application.
class StreamMemory {
  public:
    StreamMemory(uint64_t bytes, cudaStream_t stream);
    ~StreamMemory();
    StreamMemory(StreamMemory&& other) noexcept : memory_(other.memory_), stream_(other.stream_) {
        other.memory_ = nullptr;
    }
    StreamMemory(const StreamMemory&) = delete;
    StreamMemory& operator=(const StreamMemory&) = delete;
    uint8_t* get() const { return static_cast<uint8_t*>(memory_); }

  private:
    void* memory_ = nullptr;
    cudaStream_t stream_;
};

// The outcome of a message in pinned memory, written by the device. Valid after the message's event.
struct MessageStatus {
    uint32_t failure;  // a Failure of read_message.h, when the message was applied
    uint32_t refused;  // 1: the update was not finite, and the message is empty
    uint64_t nonfinite;
    uint64_t first_nonfinite;
};

// The status of a message and the event after its last use. Slots are kept in a list for each device and never freed,
// because kernels may still use one after the last reference to its message is gone.
struct StatusSlot {
    PinnedMemory<uint8_t> memory;
    MessageStatus* status = nullptr;
    cudaEvent_t used = nullptr;
};

// The memory of a message: on the device, and a pinned copy if it has one.
struct MessageBuffer {
    int device = 0;
    uint64_t capacity = 0;
    DeviceMemory<uint8_t> own_device;
    PinnedMemory<uint8_t> own_host;
    std::unique_ptr<StatusSlot> slot;
    uint8_t* on_device = nullptr;
    uint8_t* on_host = nullptr;  // null: only on the device
    MessageStatus* status = nullptr;
    cudaEvent_t used = nullptr;
    bool captured = false;  // used inside a graph, where no event records its completion

    ~MessageBuffer();
    // Order the stream after all earlier uses; record a use after it is enqueued.
    void begin_use(cudaStream_t stream);
    void end_use(cudaStream_t stream);
    void wait() const;
};

// Return a buffer in memory of the caller's, which must stay alive.
std::shared_ptr<MessageBuffer> borrow_buffer(int device, uint8_t* on_device, uint64_t capacity);

// Buffers of one size with pinned copies. A buffer returns to the pool with its last reference, because pinning memory
// takes longer than an encode. Buffers may outlive the pool.
class BufferPool : public std::enable_shared_from_this<BufferPool> {
  public:
    BufferPool(int device, uint64_t capacity) : device_(device), capacity_(capacity) {}
    std::shared_ptr<MessageBuffer> acquire();

  private:
    int device_;
    uint64_t capacity_;
    std::mutex mutex_;
    std::vector<std::unique_ptr<MessageBuffer>> free_;
};

}  // namespace gradwire::cuda
