// What an optimiser has moved of parameters in half precision. Memory traffic: 10 bytes per element.
#include "half_precision_kernels.h"

namespace gradwire::cuda {

template <class HalfType>
__global__ void __launch_bounds__(kMovedBlock) add_moved_kernel(const __grid_constant__ MovedTable table) {
    const uint64_t begin = uint64_t{blockIdx.x} * kMovedTile;
    const uint64_t end =
        begin + kMovedTile < table.ends[table.count - 1] ? begin + kMovedTile : table.ends[table.count - 1];
    uint32_t pair = 0;
    for (uint64_t at = begin + threadIdx.x; at < end; at += kMovedBlock) {
        while (table.ends[pair] <= at) ++pair;
        const uint64_t index = at - (pair > 0 ? table.ends[pair - 1] : 0);
        const HalfType now = static_cast<const HalfType*>(table.params[pair])[index];
        float* copy = table.copies[pair] + index;
        const float before = *copy;
        *copy = before + (to_float(now) - rounded_to(now, before));
    }
}

const HalfKernels& half_kernels() {
    static const HalfKernels kernels{add_moved_kernel<Half>, add_moved_kernel<Bfloat16>};
    return kernels;
}

}  // namespace gradwire::cuda
