// The built-in declarations of nvcc that gradwire's kernels use, for a C++ compiler.
#pragma once

#include <cuda_runtime_api.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <tuple>

#define __host__
#define __device__
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static  // blocks run one after the other

struct uint3 {
    unsigned x, y, z;
};
struct dim3 : uint3 {
    constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : uint3{x_, y_, z_} {}
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};

extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

namespace emulated {

// Barriers of the calling thread with its block or warp (threads.cpp).
void block_barrier();
void warp_barrier();
// Publish a word to the other lanes, and return the words of all 32 lanes.
const uint64_t* warp_exchange(uint64_t word);

cudaError_t launch(dim3 blocks, dim3 threads, cudaStream_t stream, std::function<void()> kernel);

template <class T>
T warp_read(T value, unsigned lane) {
    static_assert(sizeof(T) <= 8);
    uint64_t word = 0;
    std::memcpy(&word, &value, sizeof value);
    const uint64_t* words = warp_exchange(word);
    std::memcpy(&value, &words[lane], sizeof value);
    warp_barrier();  // before any lane publishes its next word
    return value;
}

}  // namespace emulated

struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    size_t dynamicSmemBytes = 0;
    cudaStream_t stream = nullptr;
};

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
    std::tuple<std::decay_t<Parameters>...> copies(static_cast<std::decay_t<Parameters>>(arguments)...);
    return emulated::launch(config->gridDim, config->blockDim, config->stream,
                            [kernel, copies] { std::apply(kernel, copies); });
}

inline void __syncthreads() { emulated::block_barrier(); }
inline void __syncwarp() { emulated::warp_barrier(); }
inline void __threadfence() {}

inline unsigned __ballot_sync(unsigned, bool vote) {
    const uint64_t* votes = emulated::warp_exchange(vote);
    unsigned word = 0;
    for (unsigned i = 0; i < 32; ++i) word |= static_cast<unsigned>(votes[i] & 1) << i;
    emulated::warp_barrier();
    return word;
}
template <class T>
T __shfl_sync(unsigned, T value, unsigned lane) {
    return emulated::warp_read(value, lane % 32);
}
template <class T>
T __shfl_up_sync(unsigned, T value, unsigned distance) {
    const unsigned lane = threadIdx.x % 32;
    return emulated::warp_read(value, lane < distance ? lane : lane - distance);
}

// Threads switch at barriers only, so reading and writing are atomic.
template <class T, class Operand>
T atomicAdd(T* word, Operand value) {
    const T before = *word;
    *word = before + static_cast<T>(value);
    return before;
}
template <class T>
T atomicMin(T* word, T value) {
    const T before = *word;
    if (value < before) *word = value;
    return before;
}
inline unsigned atomicOr(unsigned* word, unsigned bits) {
    const unsigned before = *word;
    *word = before | bits;
    return before;
}
inline unsigned atomicXor(unsigned* word, unsigned bits) {
    const unsigned before = *word;
    *word = before ^ bits;
    return before;
}
inline unsigned atomicCAS(unsigned* word, unsigned expected, unsigned value) {
    const unsigned before = *word;
    if (before == expected) *word = value;
    return before;
}

inline double sinpi(double x) { return std::sin(3.141592653589793 * x); }
inline int __popcll(long long word) { return __builtin_popcountll(static_cast<unsigned long long>(word)); }
inline int __ffsll(long long word) { return __builtin_ffsll(word); }
inline int __clzll(long long word) { return word == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(word)); }
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return static_cast<unsigned>((uint64_t{high} << 32 | low) >> (shift & 31));
}
inline float __int_as_float(int bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
