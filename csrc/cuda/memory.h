// Memory of a device and pinned memory of the host, owned; and the buffers that messages live in.
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

// On the current device; throws CudaError.
DeviceMemory<uint8_t> allocate_device(uint64_t bytes);
PinnedMemory<uint8_t> allocate_pinned(uint64_t bytes);

// Memory of a stream, which goes back to it at the end of the scope: no call waits, and a graph can hold it. It comes
// from a pool of our own on the current device, which keeps what it has; the default one gives it back to the system
// whenever somebody waits, and its settings are not ours to change.
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

// What the device says about a message, in pinned memory: written by the device, read behind the message's event.
struct MessageStatus {
    uint32_t failure;  // of read_message.h: what was wrong when it was applied
    uint32_t refused;  // 1: the update was not finite, and the message is empty
    uint64_t nonfinite;
    uint64_t first_nonfinite;
};

// What a message needs beside its bytes: a status that the device writes, and an event behind the last use. Lent from a
// list for each device and given back to it, never freed: kernels may still be on their way when the last one forgets a
// message.
struct Ticket {
    PinnedMemory<uint8_t> memory;
    MessageStatus* status = nullptr;
    cudaEvent_t used = nullptr;
};

// Where a message lies: device memory, its pinned copy if it has one, and an event behind the last use of either.
struct MessageBuffer {
    int device = 0;
    uint64_t capacity = 0;
    DeviceMemory<uint8_t> own_device;
    PinnedMemory<uint8_t> own_host;
    std::unique_ptr<Ticket> ticket;
    uint8_t* on_device = nullptr;
    uint8_t* on_host = nullptr;  // null: only on the device
    MessageStatus* status = nullptr;
    cudaEvent_t used = nullptr;
    bool captured = false;  // written inside of a graph: no event tells when it is done

    ~MessageBuffer();
    // Puts what follows on the stream behind all earlier uses, and notes a use when it is enqueued.
    void begin_use(cudaStream_t stream);
    void end_use(cudaStream_t stream);
    void wait() const;
};

// A buffer in memory of the caller's, who keeps it alive.
std::shared_ptr<MessageBuffer> borrow_buffer(int device, uint8_t* on_device, uint64_t capacity);

// Buffers of one size, each with a pinned copy, that go back when the last message lets go of them: pinning memory
// takes longer than an encode. Buffers outlive their pool.
class BufferPool : public std::enable_shared_from_this<BufferPool> {
  public:
    BufferPool(int device, uint64_t capacity) : device_(device), capacity_(capacity) {}
    std::shared_ptr<MessageBuffer> take();

  private:
    int device_;
    uint64_t capacity_;
    std::mutex mutex_;
    std::vector<std::unique_ptr<MessageBuffer>> free_;
};

}  // namespace gradwire::cuda
