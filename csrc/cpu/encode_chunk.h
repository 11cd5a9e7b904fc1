// Pass 2: the streams of one chunk, from the list of mask words. Compiled for every instruction set.
#pragma once

#include "bits.h"
#include "kernels.h"

namespace gradwire {
namespace {

uint64_t skip_changed(ListPlace& place, uint64_t changed) {
    uint64_t wanted = changed + place.skip;  // counted from the start of the word
    unsigned here = popcount(place.word->changed);
    while (here <= wanted) {
        wanted -= here;
        if (wanted == 0) break;
        here = popcount((++place.word)->changed);
    }
    const uint64_t bits =
        wanted > 0 ? lowest_set(place.word->changed, static_cast<unsigned>(wanted)) : place.word->changed;
    const uint64_t end = place.word->index * 64 + 64 - leading_zeros(bits);
    if (wanted == 0) ++place.word;
    place.skip = static_cast<unsigned>(wanted);
    return end;
}

// Call f(base, changed, negative) for the words of the chunk, with the changed elements of this chunk only.
template <class F>
inline void for_each_word(const ChunkSource& source, F f) {
    uint64_t left = source.shape.changed;
    unsigned skip = source.first.skip;
    for (const MaskWord* word = source.first.word; left > 0; ++word) {
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

// Write the changed bits of the chunk, from its first element on. Return the number of bits up to the last changed one.
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

// Writes Rice codes, four distances to a write of each stream.
class RiceWriter {
  public:
    RiceWriter(const ChunkStreams& out, uint64_t begin, unsigned rice)
        : remainders_(out.remainders), quotients_(out.quotients), next_(begin), rice_(rice), mask_(low_bits(rice)) {}

    // List the set bits of the word that begins at element `base`.
    void list(uint64_t base, uint64_t bits) {
        const unsigned count = popcount(bits);
        // Always four at a time, because a loop that ends with the last bit is mispredicted at every word.
        for (unsigned i = 0; i < count; i += 4)
            for (unsigned lane = 0; lane < 4; ++lane, bits &= bits - 1)
                positions_[held_ + i + lane] = base + trailing_zeros(bits | kNoneLeft);
        held_ += count;
        if (held_ >= kBatch) write_fours();
    }
    uint64_t finish() {
        write_fours();
        for (unsigned i = 0; i < held_; ++i) write(next_distance(positions_[i]));
        remainders_.finish();
        quotients_.finish();
        return quotients_.bits();
    }

  private:
    static constexpr unsigned kBatch = 256;
    static constexpr uint64_t kNoneLeft = uint64_t{1} << 63;  // keeps trailing_zeros defined

    uint64_t next_distance(uint64_t position) {
        const uint64_t distance = position - next_;
        next_ = position + 1;
        return distance;
    }
    void write(uint64_t distance) {
        remainders_.put(distance & mask_, rice_);
        quotients_.put_unary(distance >> rice_);
    }
    void write_fours() {
        const unsigned fours = held_ / 4 * 4;
        for (unsigned i = 0; i < fours; i += 4) {
            const uint64_t* at = positions_ + i;
            const uint64_t d[4] = {at[0] - next_, at[1] - at[0] - 1, at[2] - at[1] - 1, at[3] - at[2] - 1};
            next_ = at[3] + 1;
            const uint64_t q[4] = {d[0] >> rice_, d[1] >> rice_, d[2] >> rice_, d[3] >> rice_};
            const uint64_t bits = q[0] + q[1] + q[2] + q[3] + 4;
            if (__builtin_expect(rice_ > 14 || bits > 56, 0)) {
                for (const uint64_t distance : d) write(distance);
                continue;
            }
            remainders_.put(
                (d[0] & mask_) | (d[1] & mask_) << rice_ | (d[2] & mask_) << 2 * rice_ | (d[3] & mask_) << 3 * rice_,
                4 * rice_);
            const uint64_t one = 1;
            quotients_.put(one << q[0] | one << (q[0] + q[1] + 1) | one << (q[0] + q[1] + q[2] + 2) | one << (bits - 1),
                           static_cast<unsigned>(bits));
        }
        for (unsigned i = fours; i < held_; ++i) positions_[i - fours] = positions_[i];
        held_ -= fours;
    }

    BitWriter remainders_;
    BitWriter quotients_;
    uint64_t next_;
    unsigned rice_;
    uint64_t mask_;
    unsigned held_ = 0;
    uint64_t positions_[kBatch + 128];
};

// The code of one byte of a bitmap. Up to kMostDenseRice most bytes hold listed elements, so a table of bytes is faster
// than a list of distances. The code depends on the byte and on the gap before it modulo 2^k.
struct ByteCode {
    uint32_t remainders;
    uint16_t quotients;  // a zero for every 2^k elements of a gap, a one for every listed element
    uint8_t remainder_bits;
    uint8_t quotient_bits;
};
template <unsigned kRice>
struct ByteCodes {
    ByteCode code[1U << kRice][256];
    constexpr ByteCodes() : code() {
        for (unsigned gap_before = 0; gap_before < 1U << kRice; ++gap_before)
            for (unsigned byte = 0; byte < 256; ++byte) code[gap_before][byte] = code_byte(byte, gap_before);
    }
    static constexpr ByteCode code_byte(unsigned byte, unsigned gap) {
        ByteCode out{0, 0, 0, 0};
        for (unsigned bit = 0; bit < 8; ++bit) {
            if (byte >> bit & 1) {
                out.remainders |= gap << out.remainder_bits;
                out.quotients = static_cast<uint16_t>(out.quotients | 1U << out.quotient_bits);
                out.remainder_bits = static_cast<uint8_t>(out.remainder_bits + kRice);
                ++out.quotient_bits;
                gap = 0;
            } else if (++gap == 1U << kRice) {
                ++out.quotient_bits;
                gap = 0;
            }
        }
        return out;
    }
};

// Rice-encode a bitmap of `bits` bits.
template <unsigned kRice>
uint64_t write_dense_rice(const uint64_t* bitmap, uint64_t bits, const ChunkStreams& out) {
    static constexpr ByteCodes<kRice> kCodes;
    BitWriter remainders(out.remainders);
    BitWriter quotients(out.quotients);
    unsigned gap = 0;
    for (uint64_t at = 0; at < bits; at += 64) {
        uint64_t word = bitmap[at / 64];
        for (unsigned half = 0; half < 2; ++half) {
            uint64_t r[2] = {0, 0};
            unsigned r_bits[2] = {0, 0};
            uint64_t q = 0;
            unsigned q_bits = 0;  // at most 9 of a byte
            for (unsigned byte = 0; byte < 4; ++byte, word >>= 8) {
                const auto own = static_cast<unsigned>(word & 255);
                const ByteCode& code = kCodes.code[gap][own];
                // Without listed elements the gap stays what it is modulo 2^k. A branch would be mispredicted.
                gap &= own == 0 ? ~0U : 0U;
                gap |= static_cast<unsigned>(__builtin_clz(own << 24 | 1U << 23)) & ((1U << kRice) - 1);
                r[byte / 2] |= uint64_t{code.remainders} << r_bits[byte / 2];
                r_bits[byte / 2] += code.remainder_bits;
                q |= uint64_t{code.quotients} << q_bits;
                q_bits += code.quotient_bits;
            }
            if (__builtin_expect(r_bits[0] + r_bits[1] <= 56, 1)) {
                remainders.put(r[0] | r[1] << r_bits[0], r_bits[0] + r_bits[1]);
            } else {
                remainders.put(r[0], r_bits[0]);
                remainders.put(r[1], r_bits[1]);
            }
            quotients.put(q, q_bits);
        }
    }
    remainders.finish();
    quotients.finish();
    return quotients.bits();
}

inline uint64_t write_dense(const ChunkSource& source, const ChunkStreams& out) {
    uint64_t bits = write_bitmap(source, out.bitmap);
    if (source.shape.inverted) {
        bits = source.shape.span;
        const uint64_t words = (bits + 63) / 64;
        for (uint64_t i = 0; i < words; ++i) out.bitmap[i] = ~out.bitmap[i];
        if (bits % 64 > 0) out.bitmap[words - 1] &= low_bits(bits % 64);
    }
    const uint64_t written = source.shape.rice == 1   ? write_dense_rice<1>(out.bitmap, bits, out)
                             : source.shape.rice == 2 ? write_dense_rice<2>(out.bitmap, bits, out)
                                                      : write_dense_rice<3>(out.bitmap, bits, out);
    return last_one(out.quotients, written);  // without the zeros of the gap after the last listed element
}

inline uint64_t write_changed(const ChunkSource& source, const ChunkStreams& out) {
    RiceWriter writer(out, source.begin, source.shape.rice);
    for_each_word(source, [&](uint64_t base, uint64_t changed, uint64_t) { writer.list(base, changed); });
    return writer.finish();
}

inline uint64_t write_unchanged(const ChunkSource& source, const ChunkStreams& out) {
    RiceWriter writer(out, source.begin, source.shape.rice);
    const uint64_t end = source.begin + source.shape.span;
    const MaskWord* word = source.first.word;
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
    const ChunkShape& shape = source.shape;
    if (shape.listed == 0) return 0;
    if (shape.rice == 0) return write_bitmap(source, out.quotients);
    if (shape.rice <= kMostDenseRice) return write_dense(source, out);
    return shape.inverted ? write_unchanged(source, out) : write_changed(source, out);
}

}  // namespace
}  // namespace gradwire
