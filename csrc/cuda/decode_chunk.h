// The decoding of a chunk, by one block: to check it, and to add to the elements it changes inside a window of the
// target.
//
// Each thread decodes 32 quotient bits. The quotient of the i-th listed element ends with the one at bit T, so the
// element's position is ((T - i) << k) + (sum of the remainders up to element i) + i; scans give i and the sum. Every
// read stays inside the message and every write inside the window, even if the bytes have changed since the check.
#pragma once

#include "../common/partition.h"
#include "read_message.h"
#include "update_arrays.h"

namespace gradwire::cuda {

inline constexpr unsigned kQuotientBits = 32;  // per thread and round

// The shape and the streams of a chunk, from its entry.
struct OpenChunk {
    ChunkShape shape;
    uint64_t begin;
    uint64_t remainder_bit;
    uint64_t sign_bit;
    uint64_t quotient_bit;
    uint64_t quotient_bits;  // the last chunk: up to the end of the stream, padding included
    bool last;

    GRADWIRE_HD OpenChunk(const ReadMessage& message, const ChunkEntry& entry, uint64_t index)
        : shape(chunk_shape(message.changed_in(index), entry.unchanged)),
          begin(entry.begin),
          remainder_bit(entry.bit),
          sign_bit(entry.bit + shape.listed * shape.rice),
          quotient_bit(sign_bit + shape.changed),
          quotient_bits(shape.listed + entry.quotients),
          last(index + 1 == message.chunks) {
        if (last) quotient_bits = message.stream_bits() > quotient_bit ? message.stream_bits() - quotient_bit : 0;
    }
    GRADWIRE_HD uint32_t quotients_at(const ByteSource& stream, uint64_t at) const {
        if (at >= quotient_bits) return 0;
        const uint64_t left = quotient_bits - at;
        return static_cast<uint32_t>(stream.bits_at(quotient_bit + at) &
                                     low_bits(left < kQuotientBits ? static_cast<unsigned>(left) : kQuotientBits));
    }
    GRADWIRE_HD uint64_t remainder_at(const ByteSource& stream, uint64_t index) const {
        if (shape.rice == 0) return 0;
        return stream.word_at_bit(remainder_bit + index * shape.rice) & low_bits(shape.rice);
    }
};

// The totals before a round of kThreads * kQuotientBits bits.
struct DecodedBefore {
    uint64_t at;          // quotient bits
    uint64_t listed;      // elements
    uint64_t remainders;  // their sum
    uint64_t reach;       // one after the last of them
};

// Call visit(i, position, reach before it) for every listed element, from any thread; positions are counted from the
// start of the chunk. Stop after the round that reaches element `stop`. Return the totals.
template <class Team, class Visit>
GRADWIRE_TEAM DecodedBefore decode_listed(Team& team, const ByteSource& stream, const OpenChunk& chunk, uint64_t stop,
                                          Visit visit) {
    const unsigned rice = chunk.shape.rice;
    DecodedBefore round{0, 0, 0, 0};
    while (round.at < chunk.quotient_bits && round.listed < chunk.shape.listed && round.reach < stop) {
        Local<Team, uint64_t> ones, sums, reach;
        team.each([&](unsigned thread) {
            ones[thread] = popcount(chunk.quotients_at(stream, round.at + thread * kQuotientBits));
        });
        const uint64_t all_ones = exclusive_sum(team, ones);
        team.each([&](unsigned thread) {
            const uint64_t from = round.listed + ones[thread];
            const unsigned own = popcount(chunk.quotients_at(stream, round.at + thread * kQuotientBits));
            sums[thread] = 0;
            for (unsigned i = 0; i < own && from + i < chunk.shape.listed; ++i)
                sums[thread] += chunk.remainder_at(stream, from + i);
        });
        const uint64_t all_sums = exclusive_sum(team, sums);
        const auto for_each_one = [&](unsigned thread, auto f) {
            const uint64_t at = round.at + thread * kQuotientBits;
            uint64_t i = round.listed + ones[thread];
            uint64_t sum = round.remainders + sums[thread];
            for (uint64_t bits = chunk.quotients_at(stream, at); bits != 0 && i < chunk.shape.listed;
                 bits &= bits - 1, ++i) {
                sum += chunk.remainder_at(stream, i);
                f(i, ((at + trailing_zeros(bits) - i) << rice) + sum + i);
            }
        };
        team.each([&](unsigned thread) {
            reach[thread] = 0;
            for_each_one(thread, [&](uint64_t, uint64_t position) { reach[thread] = position + 1; });
        });
        const uint64_t all_reach = team.exclusive_scan(reach, uint64_t{0}, Most{});
        team.each([&](unsigned thread) {
            uint64_t before = reach[thread] > round.reach ? reach[thread] : round.reach;
            for_each_one(thread, [&](uint64_t i, uint64_t position) {
                visit(i, position, before);
                before = position + 1;
            });
        });
        round = {round.at + Team::kThreads * kQuotientBits, round.listed + all_ones, round.remainders + all_sums,
                 all_reach > round.reach ? all_reach : round.reach};
    }
    return round;
}

// Check the streams of a chunk, as validate_payload in message.cpp does.
template <class Team>
GRADWIRE_TEAM uint32_t check_chunk(Team& team, const ByteSource& stream, const OpenChunk& chunk) {
    Local<Team, uint64_t> ones, used, sums;
    team.each([&](unsigned thread) {
        ones[thread] = used[thread] = sums[thread] = 0;
        for (uint64_t at = uint64_t{thread} * kQuotientBits; at < chunk.quotient_bits;
             at += uint64_t{Team::kThreads} * kQuotientBits) {
            const uint32_t bits = chunk.quotients_at(stream, at);
            ones[thread] += popcount(bits);
            if (bits != 0) used[thread] = at + 64 - leading_zeros(bits);
        }
        if (chunk.shape.rice > 0)
            for (uint64_t i = thread; i < chunk.shape.listed; i += Team::kThreads)
                sums[thread] += chunk.remainder_at(stream, i);
    });
    const uint64_t all_ones = exclusive_sum(team, ones);
    const uint64_t all_used = team.exclusive_scan(used, uint64_t{0}, Most{});
    const uint64_t remainders = team.exclusive_scan(sums, uint64_t{0}, BoundedSum{});
    const ChunkShape& shape = chunk.shape;
    if (all_ones != shape.listed) return kBadStream;
    const uint64_t unused = chunk.quotient_bits - all_used;
    if (unused >= 8 || (!chunk.last && unused > 0)) return kBadStream;
    const uint64_t quotients = all_used - shape.listed;
    const uint64_t unlisted = shape.span - shape.listed;
    if (quotients > unlisted >> shape.rice || (quotients << shape.rice) + remainders > unlisted) return kBadStream;
    const uint64_t reached = (quotients << shape.rice) + remainders + shape.listed;
    if (!chunk.last && shape.listed > 0 && (reached == shape.span) == shape.inverted) return kBadStream;
    return kSound;
}

// The elements of a part of the target that one block processes, in the arrays of one launch.
class Window {
  public:
    GRADWIRE_HD Window(const ArrayTable& targets, const Part& part, uint64_t from, uint64_t to)
        : begin(from), end(to), targets_(targets), part_(part), array_(targets.find(element_of_whole(part, from))) {}

    // Add `amount`, rounded once to the target's type. Elements outside the window are ignored.
    GRADWIRE_HD void add(uint64_t element, double amount) const {
        if (element < begin || element >= end) return;
        const uint64_t whole = element_of_whole(part_, element);
        unsigned array = array_;
        while (targets_.arrays[array].end <= whole) ++array;
        void* data = targets_.arrays[array].data;
        const uint64_t at = whole - targets_.first_of(array);
        if (static_cast<Dtype>(targets_.dtypes[array]) == Dtype::kFloat64)
            static_cast<double*>(data)[at] += amount;
        else
            static_cast<float*>(data)[at] += static_cast<float>(amount);
    }

    const uint64_t begin;
    const uint64_t end;

  private:
    const ArrayTable& targets_;
    const Part part_;
    const unsigned array_;
};

// Add +-quantum to the changed elements of a chunk inside the window.
template <class Team>
GRADWIRE_TEAM void apply_chunk(Team& team, const ByteSource& stream, const OpenChunk& chunk, float quantum,
                               const Window& window) {
    const uint64_t from = window.begin > chunk.begin ? window.begin - chunk.begin : 0;
    const uint64_t to = window.end - chunk.begin < chunk.shape.span ? window.end - chunk.begin : chunk.shape.span;
    if (from >= to) return;
    const auto add = [&](uint64_t position, uint64_t sign) {
        const bool minus = stream.bits_at(chunk.sign_bit + sign) & 1;
        window.add(chunk.begin + position, static_cast<double>(minus ? -quantum : quantum));
    };
    if (!chunk.shape.inverted) {
        decode_listed(team, stream, chunk, to, [&](uint64_t i, uint64_t position, uint64_t) {
            if (position >= from && position < to) add(position, i);
        });
        return;
    }
    // The elements between two listed ones have changed.
    const auto add_run = [&](uint64_t begin, uint64_t end, uint64_t listed, uint64_t first, uint64_t step) {
        for (uint64_t p = (begin > from ? begin : from) + first; p < (end < to ? end : to); p += step)
            add(p, p - listed);
    };
    const DecodedBefore all =
        decode_listed(team, stream, chunk, to,
                      [&](uint64_t i, uint64_t position, uint64_t reach) { add_run(reach, position, i, 0, 1); });
    team.each([&](unsigned thread) {
        if (all.listed >= chunk.shape.listed)
            add_run(all.reach, chunk.shape.span, chunk.shape.listed, thread, Team::kThreads);
    });
}

template <class Value>
GRADWIRE_HD void add_dense(const ByteSource& payload, uint64_t element, double scale, const Window& window) {
    Value value;
    const uint64_t bits = payload.word_at(element * sizeof value);
    std::memcpy(&value, &bits, sizeof value);
    window.add(element, scale * to_scalar<double>(value));
}

// Add the values of a dense message in the window, times `scale`.
template <class Team>
GRADWIRE_TEAM void apply_dense(Team& team, const ByteSource& payload, DenseType dtype, double scale,
                               const Window& window) {
    team.each([&](unsigned thread) {
        for (uint64_t i = window.begin + thread; i < window.end; i += Team::kThreads) switch (dtype) {
                case DenseType::kFloat32: add_dense<float>(payload, i, scale, window); break;
                case DenseType::kFloat64: add_dense<double>(payload, i, scale, window); break;
                case DenseType::kBfloat16: add_dense<Bfloat16>(payload, i, scale, window); break;
                case DenseType::kNone: break;
            }
    });
}

// Apply one message to one window. Chunks outside the window are skipped.
template <class Team>
GRADWIRE_TEAM void apply_message(Team& team, const ByteSource& source, const ReadMessage& message,
                                 const ChunkEntry* entries, double scale, const Window& window) {
    const ByteSource payload{source.bytes + kHeaderBytes, message.payload_bytes};
    if (message.kind == Kind::kDense) return apply_dense(team, payload, message.dtype, scale, window);
    const ByteSource stream{payload.bytes + message.directory_bytes, message.payload_bytes - message.directory_bytes};
    const float quantum = quantum_of(message, scale);
    uint64_t low = 0;  // the last chunk that begins at or before the window's begin
    for (uint64_t high = message.chunks; high - low > 1;) {
        const uint64_t middle = (low + high) / 2;
        if (entries[middle].begin <= window.begin)
            low = middle;
        else
            high = middle;
    }
    for (uint64_t i = low; i < message.chunks && entries[i].begin < window.end; ++i)
        apply_chunk(team, stream, OpenChunk(message, entries[i], i), quantum, window);
}

}  // namespace gradwire::cuda
