// Pass 2: the streams of one chunk, from the list of mask words. Written once, compiled for every instruction set.
#pragma once

#include "bits.h"
#include "kernels.h"

namespace gradwire {
namespace {

// Calls f(base, changed, negative) for the chunk's listed words, cut to the chunk's own changed elements.
template <class F>
inline void for_each_word(const ChunkSource& source, F f) {
    uint64_t left = source.shape.changed;
    unsigned skip = source.skip;
    for (const MaskWord* word = source.first; left > 0; ++word) {
        uint64_t changed = word->changed;
        if (skip > 0) changed ^= lowest_set(changed, skip);
        skip = 0;
        if (popcount(changed) > left) changed = lowest_set(changed, static_cast<unsigned>(left));
        left -= popcount(changed);
        f(word->index * 64, changed, word->negative);
    }
}

inline void write_signs(const ChunkSource& source, uint64_t* out) {
    BitWriter signs(out);
    for_each_word(source, [&](uint64_t, uint64_t changed, uint64_t negative) {
        signs.put_long(gather_bits(negative, changed), popcount(changed));
    });
    signs.finish();
}

// k = 0: the changed bits as they are. Returns the number of bits.
inline uint64_t write_bitmap(const ChunkSource& source, uint64_t* out) {
    const uint64_t words = (source.shape.span + 63) / 64 + 1;
    std::memset(out, 0, words * 8);
    uint64_t bits = 0;
    for_each_word(source, [&](uint64_t base, uint64_t changed, uint64_t) {
        uint64_t at = base - source.begin;
        if (base < source.begin) {
            changed >>= source.begin - base;
            at = 0;
        }
        const unsigned shift = at & 63;
        out[at >> 6] |= changed << shift;
        if (shift > 0) out[(at >> 6) + 1] |= changed >> (64 - shift);
        bits = at + 64 - leading_zeros(changed);
    });
    return bits;
}

// Rice codes of the distances between the elements that it is shown, in order.
class RiceWriter {
  public:
    RiceWriter(const ChunkStreams& out, uint64_t begin, unsigned rice)
        : remainders_(out.remainders), quotients_(out.quotients), next_(begin), rice_(rice), mask_(low_bits(rice)) {}

    void list(uint64_t base, uint64_t bits) {
        for (; bits != 0; bits &= bits - 1) {
            const uint64_t position = base + trailing_zeros(bits);
            const uint64_t distance = position - next_;
            next_ = position + 1;
            remainders_.put(distance & mask_, rice_);
            quotients_.put_unary(distance >> rice_);
        }
    }
    uint64_t finish() {
        remainders_.finish();
        quotients_.finish();
        return quotients_.bits();
    }

  private:
    BitWriter remainders_;
    BitWriter quotients_;
    uint64_t next_;
    unsigned rice_;
    uint64_t mask_;
};

inline uint64_t write_changed(const ChunkSource& source, const ChunkStreams& out) {
    RiceWriter writer(out, source.begin, source.shape.rice);
    for_each_word(source, [&](uint64_t base, uint64_t changed, uint64_t) { writer.list(base, changed); });
    return writer.finish();
}

inline uint64_t write_unchanged(const ChunkSource& source, const ChunkStreams& out) {
    RiceWriter writer(out, source.begin, source.shape.rice);
    const uint64_t end = source.begin + source.shape.span;
    const MaskWord* word = source.first;
    for (uint64_t index = source.begin / 64; index * 64 < end; ++index) {
        uint64_t unchanged = ~uint64_t{0};
        if (word < source.last && word->index == index) unchanged = ~(word++)->changed;
        if (index * 64 < source.begin) unchanged &= ~low_bits(static_cast<unsigned>(source.begin - index * 64));
        if (end - index * 64 < 64) unchanged &= low_bits(static_cast<unsigned>(end - index * 64));
        writer.list(index * 64, unchanged);
    }
    return writer.finish();
}

uint64_t encode_chunk(const ChunkSource& source, const ChunkStreams& out) {
    write_signs(source, out.signs);
    if (source.shape.listed == 0) return 0;
    if (source.shape.rice == 0) return write_bitmap(source, out.quotients);
    return source.shape.inverted ? write_unchanged(source, out) : write_changed(source, out);
}

}  // namespace
}  // namespace gradwire
