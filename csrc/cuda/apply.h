// Applying messages to targets on a device.
#pragma once

#include <vector>

#include "../common/arrays.h"
#include "../common/partition.h"
#include "memory.h"

namespace gradwire::cuda {

// A message in device memory of `size` bytes, which may be more than the message has.
struct DeviceMessageRef {
    const uint8_t* bytes;
    uint64_t size;
    MessageStatus* status;  // receives the failure; may be null
};

// targets += scale * decoded in the part's elements, message by message in order, in one pass over the targets. All
// messages are checked first; if one is refused, no target changes. The work is only enqueued: failures appear in the
// statuses.
void apply_on_device(int device, const std::vector<DeviceMessageRef>& messages, const std::vector<Array>& targets,
                     const Part& part, double scale, cudaStream_t stream);

// Return a sentence for a Failure.
const char* failure_text(uint32_t failure);

}  // namespace gradwire::cuda
