// Parameters in half precision on a device, as half_precision.h has them in host memory.
#pragma once

#include <vector>

#include "../common/arrays.h"
#include "memory.h"

namespace gradwire::cuda {

// As gradwire::add_moved, with the same bits: only enqueued, a launch for many arrays.
void add_moved_on_device(int device, const std::vector<HalfArray>& arrays, cudaStream_t stream);

}  // namespace gradwire::cuda
