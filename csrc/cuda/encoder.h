// The encoder on device memory. All work is enqueued on the caller's stream; only documented functions wait for the
// device.
#pragma once

#include <vector>

#include "../common/arrays.h"
#include "../common/format.h"
#include "../common/partition.h"
#include "budget.h"
#include "memory.h"
#include "policy.h"

namespace gradwire::cuda {

// Return the size of a buffer for messages: the ceiling, in whole vectors of 16.
inline uint64_t message_capacity(uint64_t message_bytes) { return (message_bytes + 15) / 16 * 16; }

struct Workspace;
struct PartTable;

// An encoder whose residual, threshold and step are on a device. Used by one thread at a time; the caller orders calls
// on different streams.
class DeviceEncoder {
  public:
    // Wait for the device. Throw CudaError. Without a residual of its own the caller lends one.
    DeviceEncoder(int device, uint64_t numel, Dtype dtype, const Policy& policy, const PolicyState& policy_state,
                  bool keeps_residual = true);
    // Without a residual, for encode_into only.
    DeviceEncoder(int device, uint64_t numel, Dtype dtype);
    ~DeviceEncoder();

    // residual += update (unless it is null), and write the messages of this step to `to`, one for each part. The
    // capacity is at least message_capacity(max_ternary_bytes(elements of the part)). With `dense` the whole residual
    // is sent as values of that type, whatever the budget. The first encode in more parts than before allocates memory.
    void encode(const std::vector<ConstArray>* update, uint32_t key, bool skip_nonfinite, DenseType dense,
                const Partition& partition, const Budget& budget, const std::vector<MessageBuffer*>& to,
                cudaStream_t stream);

    // The same with the caller's residual, threshold (bfloat16 bits) and step, without any state between calls.
    // Elements that are not finite are left out.
    void encode_into(void* residual, const std::vector<ConstArray>& update, uint16_t threshold, uint32_t key,
                     uint32_t step, MessageBuffer& to, cudaStream_t stream);

    // Both functions wait for the device.
    EncoderState state();
    void set_state(const PolicyState& policy_state, uint64_t step, uint64_t changed_at);

    // Change the policy from the next step on.
    void set_policy(const Policy& policy) { policy_ = policy; }

    // Use the caller's memory as the residual from the next encode on; null: none.
    void lend_residual(void* residual);
    void* residual() const;
    int device() const { return device_; }
    uint64_t numel() const { return numel_; }
    Dtype dtype() const { return dtype_; }

  private:
    void allocate(uint64_t residual_bytes);
    template <class Residual>
    void extract(const std::vector<ConstArray>* update, bool dense, cudaStream_t stream);
    template <class Residual>
    void sample(const std::vector<ConstArray>* update, cudaStream_t stream);
    template <class Residual>
    void encode_ternary(const std::vector<PartTable>& tables, const Partition& partition, const Budget& budget,
                        uint32_t key, cudaStream_t stream);
    template <class Residual>
    void keep_to_budget(const std::vector<PartTable>& tables, const Partition& partition, const Budget& budget,
                        cudaStream_t stream);
    template <class Residual>
    void encode_as(const std::vector<ConstArray>* update, uint32_t key, bool skip_nonfinite, DenseType dense,
                   const Partition& partition, const Budget& budget, const std::vector<MessageBuffer*>& to,
                   cudaStream_t stream);
    Budget limited(const Budget& budget) const;
    unsigned blocks_for(uint64_t work, unsigned per_processor) const;

    int device_;
    uint64_t numel_;
    Dtype dtype_;
    Policy policy_;
    unsigned processors_ = 1;
    std::unique_ptr<Workspace> work_;
};

}  // namespace gradwire::cuda
