// The tables of the checksum in shared memory: threads look up different entries at the same time, which constant
// memory would serve one after the other.
#pragma once

#include "crc.h"

namespace gradwire::cuda {

struct CrcWork {
    Crc4Tables tables;
    ShiftPowers powers;
};
constexpr CrcWork make_crc_work() { return {make_crc_tables<4>(), make_shift_powers()}; }

// Copy the tables, by a whole block; ends with a barrier.
__device__ inline void load_crc_work(const CrcWork& tables, CrcWork& shared) {
    const auto* from = reinterpret_cast<const uint32_t*>(&tables);
    auto* to = reinterpret_cast<uint32_t*>(&shared);
    for (unsigned i = threadIdx.x; i < sizeof shared / sizeof(uint32_t); i += blockDim.x) to[i] = from[i];
    __syncthreads();
}

}  // namespace gradwire::cuda
