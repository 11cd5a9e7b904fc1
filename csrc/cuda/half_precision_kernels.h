// The kernels of half precision as their host code sees them.
#pragma once

#include "../common/arrays.h"
#include "../common/host_device.h"
#include "../common/scalars.h"

namespace gradwire::cuda {

inline constexpr unsigned kMovedBlock = 256;
inline constexpr unsigned kMovedTile = 16 * kMovedBlock;  // elements of a block
inline constexpr unsigned kMostPairs = 120;  // of one launch; 4 KiB of arguments is what every driver takes

// Arrays of one type, in order: a copy's elements follow those of the copy before.
struct MovedTable {
    uint32_t count = 0;
    uint64_t ends[kMostPairs];
    float* copies[kMostPairs];
    const void* params[kMostPairs];
};

// The kernel of a type of parameters.
struct HalfKernels {
    void (*float16)(MovedTable table);
    void (*bfloat16)(MovedTable table);
};
const HalfKernels& half_kernels();

}  // namespace gradwire::cuda
