#include "half_precision.h"

#include "cpu/kernels.h"
#include "parallel.h"

namespace gradwire {

void add_moved(const std::vector<HalfArray>& arrays, unsigned threads) {
    for (const HalfArray& array : arrays) {
        const AddMovedFunction add = kernels().add_moved[static_cast<size_t>(array.dtype)];
        const auto* params = static_cast<const uint8_t*>(array.params);
        run_parts(array.numel, threads, [&](unsigned, uint64_t begin, uint64_t end) {
            add(array.copy + begin, params + begin * bytes_per_element(array.dtype), end - begin);
        });
    }
}

void round_copies(const std::vector<HalfArray>& arrays, unsigned threads) {
    for (const HalfArray& array : arrays)
        run_parts(array.numel, threads, [&](unsigned, uint64_t begin, uint64_t end) {
            kernels().round_bfloat16(array.copy + begin, static_cast<uint16_t*>(array.params) + begin, end - begin);
        });
}

}  // namespace gradwire
