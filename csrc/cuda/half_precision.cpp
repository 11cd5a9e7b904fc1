#include "half_precision.h"

#include "half_precision_kernels.h"
#include "launch.h"

namespace gradwire::cuda {

void add_moved_on_device(int device, const std::vector<HalfArray>& arrays, cudaStream_t stream) {
    const DeviceScope scope(device);
    for (const Dtype dtype : {Dtype::kFloat16, Dtype::kBfloat16}) {
        MovedTable table;
        uint64_t numel = 0;
        const auto launch_all = [&] {
            const auto blocks = static_cast<unsigned>((numel + kMovedTile - 1) / kMovedTile);
            const auto kernel = dtype == Dtype::kFloat16 ? half_kernels().float16 : half_kernels().bfloat16;
            if (table.count > 0) CUDA_LAUNCH("add_moved", kernel, blocks, kMovedBlock, stream, table);
            table.count = 0;
            numel = 0;
        };
        for (const HalfArray& array : arrays) {
            if (array.dtype != dtype || array.numel == 0) continue;
            table.copies[table.count] = array.copy;
            table.params[table.count] = array.params;
            table.ends[table.count++] = numel += array.numel;
            if (table.count == kMostPairs) launch_all();
        }
        launch_all();
    }
}

}  // namespace gradwire::cuda
