// The second pass of a step over its budget of bytes, over the words that pass 1 listed: 64 elements at a time. It
// reads a word a few times and writes it twice.
#pragma once

#include "bits.h"
#include "kernels.h"

namespace gradwire {
namespace {

template <class Lanes>
void add_to_word(typename Lanes::Scalar* values, uint64_t changed, uint64_t minus, typename Lanes::Scalar quantum) {
    const typename Lanes::Vector q = Lanes::broadcast(quantum);
#pragma GCC unroll 64
    for (unsigned at = 0; at < 64; at += Lanes::kLanes)
        Lanes::store(values + at, Lanes::add_signed(Lanes::load(values + at), changed >> at, minus >> at, q));
}

template <class Lanes>
uint64_t reaching(const typename Lanes::Scalar* values, typename Lanes::Scalar bound) {
    const typename Lanes::Vector b = Lanes::broadcast(bound);
    uint64_t mask = 0;
#pragma GCC unroll 64
    for (unsigned at = 0; at < 64; at += Lanes::kLanes)
        mask |= Lanes::bits(Lanes::passing(Lanes::load(values + at), b)) << at;
    return mask;
}

// Few elements are counted one by one; where there are many, those of one bin together, because they may all be equal.
template <class Lanes>
void count_bins(const typename Lanes::Scalar* values, uint64_t among, unsigned first, uint64_t* counts) {
    using Scalar = typename Lanes::Scalar;
    constexpr unsigned kFew = 8;
    const unsigned last = first + kCountedBins - 1;
    const auto edge = [](unsigned bin) {
        return static_cast<Scalar>(bfloat16_to_float(static_cast<uint16_t>(bin < kInfinityBin ? bin : kInfinityBin)));
    };
    for (uint64_t left = among & reaching<Lanes>(values, edge(first)); left != 0;) {
        unsigned bin = magnitude_bin(values[__builtin_ctzll(left)]);
        if (bin > last) bin = last;
        uint64_t own = left & (~left + 1);
        if (popcount(left) > kFew) {
            own = left & reaching<Lanes>(values, edge(bin));
            if (bin < last) own &= ~reaching<Lanes>(values, edge(bin + 1));
        }
        counts[bin - first] += popcount(own);
        left &= ~own;
    }
}

template <class Lanes>
MaskWord keep_word(typename Lanes::Scalar* values, MaskWord word, Levels<typename Lanes::Scalar> raised,
                   typename Lanes::Scalar next, uint64_t* ties) {
    word = {word.index, word.changed & reaching<Lanes>(values, raised.bound), 0};
    if (word.changed == 0) return word;
    const uint64_t tied = word.changed & ~reaching<Lanes>(values, next);
    const unsigned sent = popcount(tied) < *ties ? popcount(tied) : static_cast<unsigned>(*ties);
    *ties -= sent;
    word.changed &= ~tied | lowest_set(tied, sent);
    if (word.changed == 0) return word;
#pragma GCC unroll 64
    for (unsigned at = 0; at < 64; at += Lanes::kLanes)
        word.negative |= Lanes::negative(Lanes::load(values + at)) << at;
    word.negative &= word.changed;
    add_to_word<Lanes>(values, word.changed, word.changed & ~word.negative, raised.quantum);
    return word;
}

}  // namespace
}  // namespace gradwire
