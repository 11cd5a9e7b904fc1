// The interface of the algorithms in this folder to a team of threads. The same code runs on a GPU and, in tests, on a
// CPU.
//
// An algorithm is a function over a Team: the threads of a warp or of a block. It is a sequence of phases,
//   team.each([&](unsigned thread) { ... });
// with a barrier after each. On a GPU every thread runs the phase once (device_team.cuh); the tests run the phase for
// one thread after the other, forwards and backwards (tests/cpp/emulated_team.h). Within a phase no thread may read
// what another thread writes. A value that a thread keeps from phase to phase is a Team::Local<T>, indexed by the
// thread. Values computed between phases are the same in every thread.
//   team.exclusive_scan(locals, identity, op)   replaces each value by op over all threads before it, and returns op
//                                               over all threads
#pragma once

#include <cstdint>

#include "../common/host_device.h"

#if defined(__CUDACC__)
#define GRADWIRE_TEAM __device__
#else
#define GRADWIRE_TEAM
#endif

namespace gradwire::cuda {

template <class Team, class T>
using Local = typename Team::template Local<T>;

struct Sum {
    GRADWIRE_HD uint64_t operator()(uint64_t a, uint64_t b) const { return a + b; }
};
struct Most {
    GRADWIRE_HD uint64_t operator()(uint64_t a, uint64_t b) const { return a > b ? a : b; }
};
// Sums that stay at most 2^62, whatever a malformed message contains.
struct BoundedSum {
    static constexpr uint64_t kBound = uint64_t{1} << 62;
    GRADWIRE_HD uint64_t operator()(uint64_t a, uint64_t b) const { return a + b < kBound ? a + b : kBound; }
};

template <class Team>
GRADWIRE_TEAM uint64_t exclusive_sum(Team& team, Local<Team, uint64_t>& values) {
    return team.exclusive_scan(values, uint64_t{0}, Sum{});
}

// --- operations that differ between device and host ---

GRADWIRE_HD inline void atomic_or(uint32_t* word, uint32_t bits) {
#if defined(__CUDA_ARCH__)
    atomicOr(word, bits);
#else
    *word |= bits;
#endif
}
GRADWIRE_HD inline void atomic_add(uint64_t* word, uint64_t value) {
#if defined(__CUDA_ARCH__)
    atomicAdd(reinterpret_cast<unsigned long long*>(word), static_cast<unsigned long long>(value));
#else
    *word += value;
#endif
}
GRADWIRE_HD inline void atomic_least(uint64_t* word, uint64_t value) {
#if defined(__CUDA_ARCH__)
    atomicMin(reinterpret_cast<unsigned long long*>(word), static_cast<unsigned long long>(value));
#else
    if (value < *word) *word = value;
#endif
}
GRADWIRE_HD inline void atomic_xor(uint32_t* word, uint32_t bits) {
#if defined(__CUDA_ARCH__)
    atomicXor(word, bits);
#else
    *word ^= bits;
#endif
}
// Keep the first failure.
GRADWIRE_HD inline void note_failure(uint32_t* status, uint32_t failure) {
#if defined(__CUDA_ARCH__)
    atomicCAS(status, 0U, failure);
#else
    if (*status == 0) *status = failure;
#endif
}

}  // namespace gradwire::cuda
