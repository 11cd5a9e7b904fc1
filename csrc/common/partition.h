// The dealing of an update's elements to parts, of which each has a message of its own: for host and device.
//
// Blocks of 2^exponent elements are dealt in turn: part i has the blocks i, parts + i, 2 parts + i and so on. The
// elements of a part are numbered through its blocks in ascending order.
#pragma once

#include <cstdint>

#include "host_device.h"

namespace gradwire {

struct Partition {
    uint64_t numel;
    uint64_t parts;
    unsigned exponent;  // at least 6; the last block may be short
};

struct Part {
    Partition partition;
    uint64_t index;
};

namespace {

// All elements as one part.
GRADWIRE_HD inline Partition undivided(uint64_t numel) { return {numel, 1, 48}; }

// Return how many of the first `end` elements of the whole are the part's.
GRADWIRE_HD inline uint64_t numel_before(const Part& part, uint64_t end) {
    const Partition& p = part.partition;
    const uint64_t block = end >> p.exponent;
    const uint64_t round = block / p.parts;
    const uint64_t own = round * p.parts + part.index;  // its block in this round
    const uint64_t inside = own < block ? uint64_t{1} << p.exponent : own == block ? end - (own << p.exponent) : 0;
    return (round << p.exponent) + inside;
}

GRADWIRE_HD inline uint64_t numel_of(const Part& part) { return numel_before(part, part.partition.numel); }

// Return the element of the whole that is element `at` of the part.
GRADWIRE_HD inline uint64_t element_of_whole(const Part& part, uint64_t at) {
    const Partition& p = part.partition;
    const uint64_t inside = at & ((uint64_t{1} << p.exponent) - 1);
    return (((at >> p.exponent) * p.parts + part.index) << p.exponent) + inside;
}

// Call f(element of the part, element of the whole, count) for the part's elements [begin, end), block by block.
template <class F>
void for_blocks(const Part& part, uint64_t begin, uint64_t end, F f) {
    const uint64_t block = uint64_t{1} << part.partition.exponent;
    while (begin < end) {
        const uint64_t stop = (begin / block + 1) * block;
        const uint64_t count = (stop < end ? stop : end) - begin;
        f(begin, element_of_whole(part, begin), count);
        begin += count;
    }
}

}  // namespace
}  // namespace gradwire
