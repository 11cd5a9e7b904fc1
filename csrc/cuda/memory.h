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

// What the device says about a message, in pinned memory: written by the device, read behind the message's event.
struct MessageStatus {
    uint32_t failure;  // of read_message.h: what was wrong when it was applied
    uint32_t refused;  // 1: the update was not finite, and the message is empty
    uint64_t nonfinite;
    uint64_t first_nonfinite;
};

// Where a message lies: device memory, its pinned copy if it has one, and an event behind the last use of either.
struct MessageBuffer {
    int device = 0;
    uint64_t capacity = 0;
    DeviceMemory<uint8_t> own_device;
    PinnedMemory<uint8_t> own_host;
    PinnedMemory<uint8_t> own_status;
    uint8_t* on_device = nullptr;
    uint8_t* on_host = nullptr;  // null: only on the device
    MessageStatus* status = nullptr;
    cudaEvent_t used = nullptr;
    bool captured = false;  // written inside of a graph: no event tells when it is done

    ~MessageBuffer() {
        if (used) cudaEventDestroy(used);
    }
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
