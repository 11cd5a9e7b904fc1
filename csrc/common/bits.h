// Bit operations for host and device. The functions are in an anonymous namespace, because this header is compiled for
// several instruction sets.
#pragma once

#include <cstdint>

#include "host_device.h"

namespace gradwire {
namespace {

GRADWIRE_HD inline unsigned popcount(uint64_t word) {
#if defined(__CUDA_ARCH__)
    return static_cast<unsigned>(__popcll(static_cast<long long>(word)));
#else
    return static_cast<unsigned>(__builtin_popcountll(word));
#endif
}
// `word` is not 0, here and below.
GRADWIRE_HD inline unsigned trailing_zeros(uint64_t word) {
#if defined(__CUDA_ARCH__)
    return static_cast<unsigned>(__ffsll(static_cast<long long>(word))) - 1;
#else
    return static_cast<unsigned>(__builtin_ctzll(word));
#endif
}
GRADWIRE_HD inline unsigned leading_zeros(uint64_t word) {
#if defined(__CUDA_ARCH__)
    return static_cast<unsigned>(__clzll(static_cast<long long>(word)));
#else
    return static_cast<unsigned>(__builtin_clzll(word));
#endif
}
GRADWIRE_HD inline uint64_t low_bits(unsigned bits) { return bits >= 64 ? ~uint64_t{0} : (uint64_t{1} << bits) - 1; }

}  // namespace
}  // namespace gradwire
