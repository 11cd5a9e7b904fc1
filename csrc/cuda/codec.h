// The codec on device memory: what the bindings call. Nothing here waits for the device but what says so; all work is
// enqueued on the stream that is passed in.
#pragma once

#include "../codec.h"
#include "memory.h"
#include "plan.h"
#include "policy.h"

namespace gradwire::cuda {

using Stream = cudaStream_t;

// Bytes that a buffer for a message needs: the ceiling, in whole vectors of 16.
inline uint64_t message_capacity(uint64_t message_bytes) { return (message_bytes + 15) / 16 * 16; }

struct Workspace;

// An encoder whose residual, threshold and step live on a device. Used by one thread at a time; calls on different
// streams are put in order by the caller.
class DeviceEncoder {
  public:
    // Waits for the device. Throws CudaError.
    DeviceEncoder(int device, uint64_t numel, Dtype dtype, const Policy& policy, double threshold);
    // Without a residual of its own, for encode_into only.
    DeviceEncoder(int device, uint64_t numel, Dtype dtype);
    ~DeviceEncoder();

    // residual += update (nothing where it is null), and the message of this step goes to `to`, whose capacity is at
    // least message_capacity(max_ternary_bytes(numel)). With `dense` everything is sent as values of that type.
    void encode(const std::vector<ConstArray>* update, uint32_t key, bool skip_nonfinite, DenseType dense,
                MessageBuffer& to, Stream stream);

    // The same on a residual of the caller's, with a threshold (bfloat16 bits) and a step of the caller's: nothing is
    // remembered from call to call. Leaves out what is not finite.
    void encode_into(void* residual, const std::vector<ConstArray>& update, uint16_t threshold, uint32_t key,
                     uint32_t step, MessageBuffer& to, Stream stream);

    // Both wait for the device.
    EncoderState state();
    void set_state(double threshold, uint64_t step, uint64_t changed_at);

    // From the next step on.
    void set_policy(const Policy& policy) { policy_ = policy; }

    void* residual() const;
    int device() const { return device_; }
    uint64_t numel() const { return numel_; }
    Dtype dtype() const { return dtype_; }

  private:
    void allocate(uint64_t residual_bytes);
    template <class Residual>
    void take(const std::vector<ConstArray>* update, bool dense, Stream stream);
    template <class Residual>
    void sample(const std::vector<ConstArray>* update, Stream stream);
    template <class Residual>
    void code(uint32_t key, bool skip_nonfinite, MessageBuffer& to, Stream stream);
    template <class Residual>
    void send_values(DenseType dtype, uint32_t key, bool skip_nonfinite, MessageBuffer& to, Stream stream);
    template <class Residual>
    void encode_as(const std::vector<ConstArray>* update, uint32_t key, bool skip_nonfinite, DenseType dense,
                   MessageBuffer& to, Stream stream);
    unsigned blocks_for(uint64_t work, unsigned per_processor) const;

    int device_;
    uint64_t numel_;
    Dtype dtype_;
    Policy policy_;
    unsigned processors_ = 1;
    std::unique_ptr<Workspace> work_;
};

// A message as apply_on_device takes it: `size` bytes of device memory, or more than the message has.
struct DeviceMessageRef {
    const uint8_t* bytes;
    uint64_t size;
    MessageStatus* status;  // gets the failure; may be null
};

// targets += scale * decoded, message by message in the order of the list, in one pass over the targets. All messages
// are checked first; if one is refused no target changes. Enqueued only: failures appear in the statuses.
void apply_on_device(int device, const std::vector<DeviceMessageRef>& messages, const std::vector<Array>& targets,
                     double scale, Stream stream);

// A sentence for a Failure.
const char* failure_text(uint32_t failure);

}  // namespace gradwire::cuda
