// Finds the changed elements of one chunk. Nothing here trusts that the bytes are those that were validated: every read
// stays inside the stream, and no element outside of the given range is handed out.
//
// A `Sink` takes the elements: one(position, minus) and run(position, elements, source, sign_bit), the latter for
// neighbours whose signs lie at `sign_bit` and on.
#pragma once

#include "bits.h"
#include "kernels.h"

namespace gradwire {
namespace {

inline constexpr unsigned kWindow = 56;  // bits of a BitSource read that are always there

// A chunk whose changed elements are listed. The i-th quotient's one lies at bit T of the quotients, so that the
// quotients before it sum up to T - i. Hands every changed element in [first, stop) to `sink`.
template <class Sink>
void walk_changed(const BitSource& source, ChunkCursor& cursor, uint64_t first, uint64_t stop, const Sink& sink) {
    const Chunk& chunk = cursor.chunk;
    const unsigned rice = chunk.shape.rice;
    const uint64_t mask = low_bits(rice);
    uint64_t i = cursor.listed_done;
    uint64_t sum = cursor.remainder_sum;
    for (uint64_t at = cursor.quotient_at; at < chunk.quotient_bits; at += kWindow) {
        uint64_t window = source.bits_at(chunk.quotient_bit + at) & low_bits(kWindow);
        uint64_t signs = source.bits_at(chunk.sign_bit + i);
        for (; window != 0 && i < chunk.shape.listed; window &= window - 1, signs >>= 1, ++i) {
            const uint64_t one = at + trailing_zeros(window);
            const uint64_t next_sum = sum + (source.bits_at(chunk.remainder_bit + i * rice) & mask);
            const uint64_t position = chunk.begin + ((one - i) << rice) + next_sum + i;
            if (position >= stop) {
                cursor.listed_done = i;
                cursor.remainder_sum = sum;
                cursor.quotient_at = one;
                return;
            }
            if (position >= first) sink.one(position, signs & 1);
            sum = next_sum;
        }
    }
    cursor.done = true;
}

// Finds the next unchanged element of an inverted chunk, or the chunk's end.
inline uint64_t next_unchanged(const BitSource& source, ChunkCursor& cursor) {
    const Chunk& chunk = cursor.chunk;
    const unsigned rice = chunk.shape.rice;
    while (cursor.listed_done < chunk.shape.listed && cursor.quotient_at < chunk.quotient_bits) {
        const uint64_t window = source.bits_at(chunk.quotient_bit + cursor.quotient_at) & low_bits(kWindow);
        if (window == 0) {
            cursor.quotient_at += kWindow;
            continue;
        }
        const uint64_t i = cursor.listed_done++;
        const uint64_t one = cursor.quotient_at + trailing_zeros(window);
        cursor.quotient_at = one + 1;
        cursor.remainder_sum += source.bits_at(chunk.remainder_bit + i * rice) & low_bits(rice);
        const uint64_t position = ((one - i) << rice) + cursor.remainder_sum + i;
        return position < chunk.shape.span ? position : chunk.shape.span;
    }
    return chunk.shape.span;
}

// A chunk whose unchanged elements are listed: runs of changed ones lie between them.
template <class Sink>
void walk_inverted(const BitSource& source, ChunkCursor& cursor, uint64_t first, uint64_t stop, const Sink& sink) {
    const Chunk& chunk = cursor.chunk;
    while (cursor.position < chunk.shape.span) {
        if (!cursor.listed_ready) cursor.listed_position = next_unchanged(source, cursor);
        cursor.listed_ready = true;
        const uint64_t at = chunk.begin + cursor.position;
        if (at < first) return;  // the caller goes forward only
        const uint64_t run_end = chunk.begin + cursor.listed_position;
        const uint64_t end = run_end < stop ? run_end : stop;
        if (at < end) {
            sink.run(at, end - at, source, chunk.sign_bit + cursor.changed_done);
            cursor.changed_done += end - at;
            cursor.position += end - at;
        }
        if (run_end >= stop) return;
        cursor.position = cursor.listed_position + 1;
        cursor.listed_ready = false;
    }
    cursor.done = true;
}

template <class Sink>
void walk_chunk(const BitSource& source, ChunkCursor& cursor, uint64_t first, uint64_t stop, const Sink& sink) {
    if (cursor.chunk.shape.inverted)
        walk_inverted(source, cursor, first, stop, sink);
    else
        walk_changed(source, cursor, first, stop, sink);
}

}  // namespace
}  // namespace gradwire
