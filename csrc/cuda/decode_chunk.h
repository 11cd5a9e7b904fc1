// The decoding of a chunk, by one block: to check it, and to add to the elements it changes inside a window of the
// target.
//
// Each thread decodes 32 quotient bits. The quotient of the i-th listed element ends with the one at bit T, so the
// element's position is ((T - i) << k) + (sum of the remainders up to element i) + i; scans give i and the sum. A
// thread's remainders and signs are one run each. Every read stays inside the message and every write inside the
// window, even if the bytes have changed since the check.
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
        return stream.bits_at(remainder_bit + index * shape.rice) & low_bits(shape.rice);
    }
};

// The totals before a round of kThreads * kQuotientBits bits, or before a thread's bits.
struct DecodedBefore {
    uint64_t at;          // quotient bits
    uint64_t listed;      // elements
    uint64_t remainders;  // their sum
    uint64_t reach;       // one after the last of them, where it is asked for
};

// Call visit(DecodedBefore, bits) for every thread's quotient bits in which listed elements end; there may be more ones
// than are left of the listed elements. Return the totals.
template <bool kReach, class Team, class Visit>
GRADWIRE_TEAM DecodedBefore decode_listed(Team& team, const ByteSource& stream, const OpenChunk& chunk, Visit visit) {
    const unsigned rice = chunk.shape.rice;
    DecodedBefore round{0, 0, 0, 0};
    while (round.at < chunk.quotient_bits && round.listed < chunk.shape.listed) {
        Local<Team, uint64_t> bits, ones, sums;
        Local<Team, uint64_t> reach;  // at first the thread's own sum
        team.each([&](unsigned thread) {
            bits[thread] = chunk.quotients_at(stream, round.at + thread * kQuotientBits);
            ones[thread] = popcount(bits[thread]);
        });
        const uint64_t all_ones = exclusive_sum(team, ones);
        const auto own = [&](unsigned thread) {
            const uint64_t from = round.listed + ones[thread];
            const uint64_t left = from < chunk.shape.listed ? chunk.shape.listed - from : 0;
            const unsigned all = popcount(bits[thread]);
            return all < left ? all : static_cast<unsigned>(left);
        };
        uint64_t all_sums = 0, all_reach = 0;
        team.each([&](unsigned thread) {
            sums[thread] = 0;
            if (rice == 0) return;
            BitReader remainders(stream, chunk.remainder_bit + (round.listed + ones[thread]) * rice);
            for (unsigned i = own(thread); i > 0; --i) sums[thread] += remainders.next(rice);
        });
        if constexpr (kReach) team.each([&](unsigned thread) { reach[thread] = sums[thread]; });
        if (rice > 0) all_sums = exclusive_sum(team, sums);
        if constexpr (kReach) {
            team.each([&](unsigned thread) {
                const uint64_t remainders = round.remainders + sums[thread] + reach[thread];
                const unsigned count = own(thread);
                reach[thread] = 0;
                if (count == 0) return;
                const uint64_t i = round.listed + ones[thread] + count - 1;
                const uint64_t at = round.at + thread * kQuotientBits + nth_bit(bits[thread], count - 1);
                reach[thread] = ((at - i) << rice) + remainders + i + 1;
            });
            all_reach = team.exclusive_scan(reach, uint64_t{0}, Most{});
        }
        team.each([&](unsigned thread) {
            if (bits[thread] == 0) return;
            uint64_t reached = 0;
            if constexpr (kReach) reached = reach[thread] > round.reach ? reach[thread] : round.reach;
            visit({round.at + thread * kQuotientBits, round.listed + ones[thread], round.remainders + sums[thread],
                   reached},
                  bits[thread]);
        });
        round = {round.at + Team::kThreads * kQuotientBits, round.listed + all_ones, round.remainders + all_sums,
                 all_reach > round.reach ? all_reach : round.reach};
    }
    return round;
}

// Call visit(i, position) for the listed elements of a thread; positions are counted from the start of the chunk.
template <class Visit>
GRADWIRE_HD void for_listed(const ByteSource& stream, const OpenChunk& chunk, const DecodedBefore& before,
                            uint64_t bits, Visit visit) {
    const unsigned rice = chunk.shape.rice;
    BitReader remainders(stream, chunk.remainder_bit + before.listed * rice);
    uint64_t sum = before.remainders;
    uint64_t i = before.listed;
    for (; bits != 0 && i < chunk.shape.listed; bits &= bits - 1, ++i) {
        if (rice > 0) sum += remainders.next(rice);
        visit(i, ((before.at + trailing_zeros(bits) - i) << rice) + sum + i);
    }
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
    template <class Amount>
    GRADWIRE_HD void add(uint64_t element, Amount amount) const {
        if (element < begin || element >= end) return;
        const uint64_t whole = element_of_whole(part_, element);
        unsigned array = array_;
        while (targets_.arrays[array].end <= whole) ++array;
        void* data = targets_.arrays[array].data;
        const uint64_t at = whole - targets_.first_of(array);
        if (static_cast<Dtype>(targets_.dtypes[array]) == Dtype::kFloat64)
            static_cast<double*>(data)[at] += static_cast<double>(amount);
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
    const auto add = [&](uint64_t position, uint64_t minus) {
        window.add(chunk.begin + position, minus ? -quantum : quantum);
    };
    if (!chunk.shape.inverted) {
        decode_listed<false>(team, stream, chunk, [&](const DecodedBefore& before, uint64_t bits) {
            BitReader signs(stream, chunk.sign_bit + before.listed);
            for_listed(stream, chunk, before, bits, [&](uint64_t, uint64_t position) { add(position, signs.next(1)); });
        });
        return;
    }
    // The elements between two listed ones have changed. A malformed position may lie beyond the chunk.
    const auto clipped = [&](uint64_t position) { return position < chunk.shape.span ? position : chunk.shape.span; };
    const DecodedBefore all = decode_listed<true>(team, stream, chunk, [&](const DecodedBefore& before, uint64_t bits) {
        uint64_t reach = before.reach;
        for_listed(stream, chunk, before, bits, [&](uint64_t i, uint64_t position) {
            BitReader signs(stream, chunk.sign_bit + reach - i);
            for (uint64_t p = reach; p < clipped(position); ++p) add(p, signs.next(1));
            reach = position + 1;
        });
    });
    team.each([&](unsigned thread) {
        if (all.listed < chunk.shape.listed) return;
        for (uint64_t p = all.reach + thread; p < chunk.shape.span; p += Team::kThreads)
            add(p, stream.bits_at(chunk.sign_bit + p - chunk.shape.listed) & 1);
    });
}

template <class Value>
GRADWIRE_HD void add_dense(const ByteSource& payload, uint64_t element, double scale, const Window& window) {
    Value value;
    const uint64_t bits = payload.word_at(element * sizeof value);
    std::memcpy(&value, &bits, sizeof value);
    window.add(element, scale * to_scalar<double>(value));
}

// Add the values of a dense message in the window, times `scale`: the share of team `block` of `blocks`.
template <class Team>
GRADWIRE_TEAM void apply_dense(Team& team, unsigned block, unsigned blocks, const ByteSource& payload, DenseType dtype,
                               double scale, const Window& window) {
    team.each([&](unsigned thread) {
        for (uint64_t i = window.begin + uint64_t{block} * Team::kThreads + thread; i < window.end;
             i += uint64_t{blocks} * Team::kThreads)
            switch (dtype) {
                case DenseType::kFloat32: add_dense<float>(payload, i, scale, window); break;
                case DenseType::kFloat64: add_dense<double>(payload, i, scale, window); break;
                case DenseType::kBfloat16: add_dense<Bfloat16>(payload, i, scale, window); break;
                case DenseType::kNone: break;
            }
    });
}

// Apply one message to elements [begin, end): the chunks of team `block` of `blocks`.
template <class Team>
GRADWIRE_TEAM void apply_message(Team& team, unsigned block, unsigned blocks, const ByteSource& source,
                                 const ReadMessage& message, const ChunkEntry* entries, double scale,
                                 const ArrayTable& targets, const Part& part, uint64_t begin, uint64_t end) {
    const ByteSource payload{source.bytes + kHeaderBytes, message.payload_bytes};
    if (message.kind == Kind::kDense)
        return apply_dense(team, block, blocks, payload, message.dtype, scale, Window(targets, part, begin, end));
    const ByteSource stream{payload.bytes + message.directory_bytes, message.payload_bytes - message.directory_bytes};
    const float quantum = quantum_of(message, scale);
    uint64_t low = 0;  // the last chunk that begins at or before `begin`
    for (uint64_t high = begin > 0 ? message.chunks : 1; high - low > 1;) {
        const uint64_t middle = (low + high) / 2;
        if (entries[middle].begin <= begin)
            low = middle;
        else
            high = middle;
    }
    for (uint64_t i = low + block; i < message.chunks && entries[i].begin < end; i += blocks) {
        const OpenChunk chunk(message, entries[i], i);
        const uint64_t from = chunk.begin > begin ? chunk.begin : begin;
        const uint64_t to = chunk.begin + chunk.shape.span < end ? chunk.begin + chunk.shape.span : end;
        if (from < to) apply_chunk(team, stream, chunk, quantum, Window(targets, part, from, to));
    }
}

}  // namespace gradwire::cuda
