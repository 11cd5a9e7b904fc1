// Decoding kernels: the sums by which a chunk is validated, and its application to a target.
#pragma once

#include "walk_chunk.h"

namespace gradwire {
namespace {

uint64_t sum_remainders(const BitSource& source, uint64_t bit, uint64_t fields, unsigned rice) {
    const uint64_t mask = low_bits(rice);
    uint64_t sum = 0;
    for (uint64_t i = 0; i < fields; ++i) sum += source.bits_at(bit + i * rice) & mask;
    return sum;
}

StreamSums sum_chunk(const uint8_t* stream, uint64_t stream_bytes, const Chunk& chunk) {
    const BitSource source{stream, stream_bytes};
    StreamSums sums{0, 0, 0};
    for (uint64_t at = 0; at < chunk.quotient_bits; at += kWindow) {
        const uint64_t left = chunk.quotient_bits - at;
        const uint64_t window = source.bits_at(chunk.quotient_bit + at) & low_bits(left < kWindow ? static_cast<unsigned>(left) : kWindow);
        if (window == 0) continue;
        sums.ones += popcount(window);
        sums.used_bits = at + 64 - leading_zeros(window);
    }
    if (chunk.shape.rice > 0)
        sums.remainders = sum_remainders(source, chunk.remainder_bit, chunk.shape.listed, chunk.shape.rice);
    return sums;
}

template <class Target>
struct AddQuantum {
    Target* target;  // of element `first`
    uint64_t first;
    Target quantum;

    void one(uint64_t position, uint64_t minus) const { target[position - first] += minus ? -quantum : quantum; }
    void run(uint64_t position, uint64_t elements, const BitSource& source, uint64_t sign_bit) const {
        Target* at = target + (position - first);
        for (uint64_t done = 0; done < elements; done += kWindow) {
            uint64_t signs = source.bits_at(sign_bit + done);
            const uint64_t some = elements - done < kWindow ? elements - done : kWindow;
            for (uint64_t i = 0; i < some; ++i, signs >>= 1) at[done + i] += signs & 1 ? -quantum : quantum;
        }
    }
};

template <class Target>
void apply_chunk(const uint8_t* stream, uint64_t stream_bytes, ChunkCursor& cursor, Target* target, uint64_t first,
                 uint64_t stop, Target quantum) {
    walk_chunk(BitSource{stream, stream_bytes}, cursor, first, stop, AddQuantum<Target>{target, first, quantum});
}

}  // namespace
}  // namespace gradwire
