// The teams of team.h on a GPU: every thread runs a phase once, then waits at the barrier.
#pragma once

#include "team.h"

namespace gradwire::cuda {

inline constexpr unsigned kWarpThreads = 32;
inline constexpr unsigned kEveryLane = 0xffffffffU;

template <class T>
struct ThreadLocal {
    T value;
    __device__ T& operator[](unsigned) { return value; }
    __device__ const T& operator[](unsigned) const { return value; }
};

// Inclusive scan over the lanes of a warp.
template <class Op>
__device__ uint64_t warp_scan(uint64_t value, Op op) {
    const unsigned lane = threadIdx.x % kWarpThreads;
#pragma unroll
    for (unsigned distance = 1; distance < kWarpThreads; distance *= 2) {
        const uint64_t before = __shfl_up_sync(kEveryLane, static_cast<unsigned long long>(value), distance);
        if (lane >= distance) value = op(before, value);
    }
    return value;
}

class WarpTeam {
  public:
    static constexpr unsigned kThreads = kWarpThreads;
    template <class T>
    using Local = ThreadLocal<T>;

    template <class F>
    __device__ void each(F f) {
        f(threadIdx.x % kWarpThreads);
        __syncwarp();
    }
    __device__ uint32_t ballot(const Local<bool>& values) { return __ballot_sync(kEveryLane, values.value); }
    __device__ uint64_t sum(const Local<uint64_t>& values) {
        return __shfl_sync(kEveryLane, static_cast<unsigned long long>(warp_scan(values.value, Sum{})),
                           kWarpThreads - 1);
    }
};

// The working memory of a block for scans.
template <unsigned kThreads>
struct BlockScratch {
    uint64_t sums[kThreads / kWarpThreads + 1];
};

template <unsigned kThreads_>
class BlockTeam {
  public:
    static constexpr unsigned kThreads = kThreads_;
    template <class T>
    using Local = ThreadLocal<T>;

    __device__ explicit BlockTeam(BlockScratch<kThreads>& scratch) : scratch_(scratch) {}

    template <class F>
    __device__ void each(F f) {
        f(threadIdx.x);
        __syncthreads();
    }
    // Each warp scans its lanes, and the first warp scans the totals. Ends with a barrier, so that the scratch is free.
    template <class Op>
    __device__ uint64_t exclusive_scan(Local<uint64_t>& values, uint64_t identity, Op op) {
        constexpr unsigned kWarps = kThreads / kWarpThreads;
        const unsigned lane = threadIdx.x % kWarpThreads;
        const unsigned warp = threadIdx.x / kWarpThreads;
        const uint64_t inclusive = warp_scan(values.value, op);
        if (lane == kWarpThreads - 1) scratch_.sums[warp] = inclusive;
        __syncthreads();
        if (warp == 0) {
            const uint64_t own = lane < kWarps ? scratch_.sums[lane] : identity;
            const uint64_t scanned = warp_scan(own, op);
            const uint64_t before = __shfl_up_sync(kEveryLane, static_cast<unsigned long long>(scanned), 1);
            if (lane < kWarps) scratch_.sums[lane] = lane == 0 ? identity : before;
            if (lane == kWarpThreads - 1) scratch_.sums[kWarps] = scanned;
        }
        __syncthreads();
        const uint64_t left = __shfl_up_sync(kEveryLane, static_cast<unsigned long long>(inclusive), 1);
        values.value = op(scratch_.sums[warp], lane == 0 ? identity : left);
        const uint64_t all = scratch_.sums[kWarps];
        __syncthreads();
        return all;
    }

  private:
    BlockScratch<kThreads>& scratch_;
};

}  // namespace gradwire::cuda
