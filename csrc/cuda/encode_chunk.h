// Pass 2 over one chunk, by one block: first for the chunk's size, then for its bits.
//
// The words of the chunk are cut into as many units as there are threads, or into more where these would be very long:
// a thread processes many words of which few are listed, or one or two where much changed. Scans over the units give
// what precedes each: the listed and changed elements, the last listed element, and the sum of the quotients. The bits
// of a thread are therefore one run in each of the three streams.
#pragma once

#include "../common/format.h"
#include "plan.h"

namespace gradwire::cuda {

struct ChunkRecord {
    uint64_t begin;  // elements
    uint64_t end;
    uint64_t quotients;  // sum
    uint64_t bit;        // of the stream, where the chunk begins
    uint64_t directory_byte;
};

struct FindShared {
    uint64_t found[2];
};

// Return the index of the element after the `rank`-th changed one, rank = 1 ... count. `shared` is free afterwards.
template <class Team>
GRADWIRE_TEAM uint64_t find_changed(Team& team, const Masks& masks, uint64_t rank, FindShared& shared) {
    static_assert(Team::kThreads == kGroupWords, "a thread for each word of a group");
    // All threads search together: each round keeps one part in kThreads. The rounds alternate between two results, so
    // that a slow thread can still read one while a fast thread writes the other.
    uint64_t low = 0, stop = masks.group_total();
    unsigned round = 0;
    for (; stop - low > 1; ++round) {
        const uint64_t step = (stop - low + Team::kThreads - 1) / Team::kThreads;
        team.each([&](unsigned thread) {
            const uint64_t from = low + thread * step;
            if (from >= stop) return;
            const uint64_t to = from + step < stop ? from + step : stop;
            if (masks.group_first[from] < rank && rank <= masks.group_first[to]) shared.found[round & 1] = from;
        });
        low = shared.found[round & 1];
        stop = low + step < stop ? low + step : stop;
    }
    Local<Team, uint64_t> before;
    Local<Team, uint64_t> own;
    team.each([&](unsigned thread) {
        const uint64_t tile = low * kGroupTiles + thread / kTileWords;
        const unsigned word = thread % kTileWords;
        own[thread] = 0;
        if (tile < masks.tile_count()) {
            const uint32_t summary = masks.tiles[tile].summary;
            if (summary >> word & 1) own[thread] = masks.listed(tile, summary, word).changed;
        }
        before[thread] = popcount(own[thread]);
    });
    exclusive_sum(team, before);
    const uint64_t wanted = rank - masks.group_first[low] - 1;
    team.each([&](unsigned thread) {
        if (wanted < before[thread] || wanted - before[thread] >= popcount(own[thread])) return;
        shared.found[round & 1] = (low * kGroupWords + thread) * kWordElements +
                                  nth_bit(own[thread], static_cast<unsigned>(wanted - before[thread])) + 1;
    });
    const uint64_t found = shared.found[round & 1];
    team.each([](unsigned) {});
    return found;
}

// A part of a chunk: whole words. The first and last word of a chunk may belong to other chunks as well.
struct Unit {
    uint64_t from_word, to_word;
};

struct Units {
    static constexpr uint64_t kMostWords = 256;
    uint64_t first_word, stop_word, each;

    GRADWIRE_HD Units(uint64_t begin, uint64_t end, unsigned threads)
        : first_word(begin / kWordElements), stop_word((end + kWordElements - 1) / kWordElements) {
        const uint64_t equal = (stop_word - first_word + threads - 1) / threads;
        each = equal < 1 ? 1 : equal < kMostWords ? equal : kMostWords;
    }
    GRADWIRE_HD uint64_t count() const { return (stop_word - first_word + each - 1) / each; }
    // Return an empty unit beyond the last.
    GRADWIRE_HD Unit at(uint64_t index) const {
        const uint64_t from = first_word + index * each;
        const uint64_t to = from + each;
        return {from < stop_word ? from : stop_word, to < stop_word ? to : stop_word};
    }
};

// A word of a chunk: bit 0 is element `at`, counted from the start of the chunk; the bits of other chunks are cleared.
struct ChunkWord {
    uint64_t at;
    uint64_t listed;
    uint64_t changed;
    uint64_t negative;
};

GRADWIRE_HD inline ChunkWord chunk_word(uint64_t word, const MaskPair& pair, uint64_t begin, uint64_t end,
                                        bool inverted) {
    const uint64_t base = word * kWordElements;
    uint64_t own = ~uint64_t{0};
    if (end - base < kWordElements) own = low_bits(static_cast<unsigned>(end - base));
    unsigned shift = 0;
    if (base < begin) shift = static_cast<unsigned>(begin - base);
    const uint64_t changed = (pair.changed & own) >> shift;
    const uint64_t listed = inverted ? (~pair.changed & own) >> shift : changed;
    return {base + shift - begin, listed, changed, pair.negative >> shift};
}

// Call f(ChunkWord) for the words of the unit with listed or changed elements, in order.
template <class F>
GRADWIRE_HD void for_each_word(const Masks& masks, const Unit& unit, uint64_t begin, uint64_t end, bool inverted, F f) {
    for (uint64_t word = unit.from_word; word < unit.to_word;) {
        const uint64_t tile = word / kTileWords;
        const uint64_t next = (tile + 1) * kTileWords < unit.to_word ? (tile + 1) * kTileWords : unit.to_word;
        const uint32_t summary = masks.tiles[tile].summary;
        const auto from = static_cast<unsigned>(word - tile * kTileWords);
        const auto to = static_cast<unsigned>(next - tile * kTileWords);
        uint64_t wanted = low_bits(to) & ~low_bits(from);
        if (!inverted) wanted &= summary;
        for (; wanted != 0; wanted &= wanted - 1) {
            const unsigned i = trailing_zeros(wanted);
            const MaskPair pair = summary >> i & 1 ? masks.listed(tile, summary, i) : MaskPair{0, 0};
            f(chunk_word(tile * kTileWords + i, pair, begin, end, inverted));
        }
        word = next;
    }
}

// The places of a chunk's streams; bits are counted from the start of the message.
struct ChunkTarget {
    uint32_t* words;
    uint64_t remainder_bit;
    uint64_t sign_bit;
    uint64_t quotient_bit;
};

// The totals before a unit, or before a round of units.
struct UnitsBefore {
    uint64_t listed;
    uint64_t changed;
    uint64_t reach;  // one after the last listed element
    uint64_t quotients;
};

GRADWIRE_HD inline uint64_t sum_quotients(const Masks& masks, const Unit& unit, uint64_t begin, uint64_t end,
                                          const ChunkShape& shape, uint64_t reach) {
    uint64_t sum = 0;
    for_each_word(masks, unit, begin, end, shape.inverted, [&](const ChunkWord& word) {
        for (uint64_t bits = word.listed; bits != 0; bits &= bits - 1) {
            const uint64_t position = word.at + trailing_zeros(bits);
            sum += (position - reach) >> shape.rice;
            reach = position + 1;
        }
    });
    return sum;
}

GRADWIRE_HD inline void write_unit(const Masks& masks, const Unit& unit, uint64_t begin, uint64_t end,
                                   const ChunkShape& shape, const UnitsBefore& before, const ChunkTarget& to) {
    BitRunWriter remainders(to.words, to.remainder_bit + before.listed * shape.rice);
    BitRunWriter signs(to.words, to.sign_bit + before.changed);
    BitRunWriter quotients(to.words, to.quotient_bit + before.listed + before.quotients);
    uint64_t reach = before.reach;
    for_each_word(masks, unit, begin, end, shape.inverted, [&](const ChunkWord& word) {
        uint64_t negative = 0;
        unsigned changed = 0;
        for (uint64_t bits = word.changed; bits != 0; bits &= bits - 1, ++changed)
            negative |= (word.negative >> trailing_zeros(bits) & 1) << changed;
        if (changed > 0) signs.put_long(negative, changed);
        if (word.listed == 0) return;
        if (shape.rice == 0) {  // the quotients are the bitmap
            if (word.at > reach) quotients.skip(word.at - reach);
            quotients.put_long(word.listed, 64 - leading_zeros(word.listed));
            reach = word.at + 64 - leading_zeros(word.listed);
            return;
        }
        for (uint64_t bits = word.listed; bits != 0; bits &= bits - 1) {
            const uint64_t position = word.at + trailing_zeros(bits);
            const uint64_t distance = position - reach;
            reach = position + 1;
            remainders.put_long(distance & low_bits(shape.rice), shape.rice);
            quotients.put_unary(distance >> shape.rice);
        }
    });
    remainders.finish();
    signs.finish();
    quotients.finish();
}

// Return the sum of the chunk's quotients; with `to`, write its streams.
template <class Team>
GRADWIRE_TEAM uint64_t encode_chunk(Team& team, const Masks& masks, uint64_t begin, uint64_t end,
                                    const ChunkShape& shape, const ChunkTarget* to) {
    const Units units(begin, end, Team::kThreads);
    UnitsBefore round{0, 0, 0, 0};
    for (uint64_t first = 0; first < units.count(); first += Team::kThreads) {
        Local<Team, uint64_t> listed, changed, reach, quotients;
        team.each([&](unsigned thread) {
            listed[thread] = changed[thread] = reach[thread] = 0;
            for_each_word(masks, units.at(first + thread), begin, end, shape.inverted, [&](const ChunkWord& word) {
                listed[thread] += popcount(word.listed);
                changed[thread] += popcount(word.changed);
                if (word.listed != 0) reach[thread] = word.at + 64 - leading_zeros(word.listed);
            });
        });
        const uint64_t all_listed = exclusive_sum(team, listed);
        const uint64_t all_changed = shape.inverted ? exclusive_sum(team, changed) : all_listed;
        const uint64_t all_reach = team.exclusive_scan(reach, uint64_t{0}, Most{});
        const auto reach_before = [&](unsigned thread) {
            return reach[thread] > round.reach ? reach[thread] : round.reach;
        };
        uint64_t all_quotients = 0;
        if (shape.rice > 0) {
            team.each([&](unsigned thread) {
                quotients[thread] =
                    sum_quotients(masks, units.at(first + thread), begin, end, shape, reach_before(thread));
            });
            all_quotients = exclusive_sum(team, quotients);
        } else if (all_listed > 0) {  // each unlisted element before the last listed one is a zero
            all_quotients = all_reach - all_listed - round.reach;
        }
        if (to) {
            team.each([&](unsigned thread) {
                UnitsBefore before{round.listed + listed[thread], 0, reach_before(thread), 0};
                before.changed = round.changed + (shape.inverted ? changed[thread] : listed[thread]);
                before.quotients = shape.rice > 0 ? round.quotients + quotients[thread] : before.reach - before.listed;
                write_unit(masks, units.at(first + thread), begin, end, shape, before, *to);
            });
        }
        round = {round.listed + all_listed, round.changed + all_changed,
                 all_reach > round.reach ? all_reach : round.reach, round.quotients + all_quotients};
    }
    return round.quotients;
}

// Find the borders of a chunk and its sum of quotients.
template <class Team>
GRADWIRE_TEAM void size_chunk(Team& team, const Masks& masks, const Plan& plan, uint64_t index, ChunkRecord* records,
                              FindShared& shared) {
    const uint64_t changed = plan.changed_in(index);
    const bool last = index + 1 == plan.chunks;
    const uint64_t before = index << plan.exponent;
    const uint64_t begin = index == 0 ? 0 : find_changed(team, masks, before, shared);
    const uint64_t end = last ? masks.numel : find_changed(team, masks, before + changed, shared);
    const ChunkShape shape = chunk_shape(changed, end - begin - changed);
    const uint64_t quotients = shape.listed > 0 ? encode_chunk(team, masks, begin, end, shape, nullptr) : 0;
    team.each([&](unsigned thread) {
        if (thread == 0) records[index] = {begin, end, quotients, 0, 0};
    });
}

// Write the streams of a chunk; `message` is zero there.
template <class Team>
GRADWIRE_TEAM void write_chunk(Team& team, const Masks& masks, const Plan& plan, uint64_t index,
                               const ChunkRecord* records, uint32_t* message) {
    const ChunkRecord record = records[index];
    const uint64_t changed = plan.changed_in(index);
    const ChunkShape shape = chunk_shape(changed, record.end - record.begin - changed);
    const uint64_t bit = (kHeaderBytes + plan.directory_bytes) * 8 + record.bit;
    const uint64_t sign_bit = bit + shape.listed * shape.rice;
    const ChunkTarget to{message, bit, sign_bit, sign_bit + changed};
    encode_chunk(team, masks, record.begin, record.end, shape, &to);
}

}  // namespace gradwire::cuda
