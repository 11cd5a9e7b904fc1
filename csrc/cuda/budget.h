// A budget of bytes: if the messages of a step would be too large, the elements that reached the threshold are put back
// and only the largest of them are extracted, with a larger threshold. The result is that of Encoder::keep_largest.
// Elements are compared by the upper bits of their magnitudes (magnitude_bin).
#pragma once

#include "extract_tile.h"

namespace gradwire::cuda {

struct Budget {
    uint64_t max_bytes = UINT64_MAX;  // of all messages of a step
    uint64_t most_changed = UINT64_MAX;
    bool is_policy = false;  // the limit of TargetDensity: of the elements whatever their bytes, but not of a shake-up
};

// Return whether a step is over its budget.
GRADWIRE_HD inline bool is_over(const Budget& budget, uint64_t bytes, uint64_t reached, bool is_shakeup) {
    if (reached <= budget.most_changed) return false;
    return budget.is_policy ? !is_shakeup : bytes > budget.max_bytes;
}

// What a step sends if it is over its budget.
struct Selection {
    uint64_t bytes;        // of the messages without a budget
    uint64_t reached;      // their changed elements
    uint64_t ties;         // elements in the lowest bin that are sent: those with the lowest part and index
    uint64_t ties_before;  // elements in that bin in the parts counted so far
    uint32_t lowest;       // bin
    uint32_t is_over;
};

// Return word `index` of the masks.
GRADWIRE_HD inline MaskPair word_at(const Masks& masks, uint64_t index) {
    const uint64_t tile = index / kTileWords;
    if (tile >= masks.tile_count()) return {0, 0};
    const uint32_t summary = masks.tiles[tile].summary;
    const auto inside = static_cast<unsigned>(index % kTileWords);
    return summary >> inside & 1 ? masks.listed(tile, summary, inside) : MaskPair{0, 0};
}

// Undo pass 1 on one word of the whole, and count the magnitudes. Neighbours in one bin are counted together.
template <class Residual>
GRADWIRE_HD void put_back_word(const Masks& whole, Residual* residual, Residual quantum, uint64_t index,
                               uint64_t* bins) {
    const MaskPair pair = word_at(whole, index);
    unsigned bin = 0;
    uint64_t run = 0;
    for (uint64_t bits = pair.changed; bits != 0; bits &= bits - 1) {
        const unsigned i = trailing_zeros(bits);
        Residual& value = residual[index * kWordElements + i];
        value += pair.negative >> i & 1 ? -quantum : quantum;
        const unsigned own = magnitude_bin(value);
        if (own != bin && run > 0) {
            atomic_add(bins + bin, run);
            run = 0;
        }
        bin = own;
        ++run;
    }
    if (run > 0) atomic_add(bins + bin, run);
}

// Find the lowest bin of which elements are sent, and clear the bins. More than `most` elements are counted. A team is
// a block, the only one.
template <class Team>
GRADWIRE_TEAM void choose_lowest(Team& team, uint64_t* bins, uint64_t most, Selection* selection) {
    constexpr unsigned kOwn = kMagnitudeBins / Team::kThreads;
    Local<Team, uint64_t> above;
    team.each([&](unsigned thread) {
        above[thread] = 0;
        for (unsigned i = 0; i < kOwn; ++i) above[thread] += bins[kMagnitudeBins - 1 - (thread * kOwn + i)];
    });
    exclusive_sum(team, above);
    team.each([&](unsigned thread) {
        uint64_t before = above[thread];
        for (unsigned i = 0; i < kOwn; ++i) {
            const unsigned bin = kMagnitudeBins - 1 - (thread * kOwn + i);
            const uint64_t own = bins[bin];
            bins[bin] = 0;
            if (before <= most && before + own > most) {
                selection->lowest = bin;
                selection->ties = most - before;
            }
            before += own;
        }
    });
}

// Return the changed elements of a part's word that are in the lowest bin.
template <class Residual>
GRADWIRE_HD uint64_t ties_of(const Part& part, const MaskPair& pair, uint64_t index, const Residual* residual,
                             unsigned lowest) {
    if (pair.changed == 0) return 0;
    const Residual* values = residual + element_of_whole(part, index * kWordElements);
    uint64_t ties = 0;
    for (uint64_t bits = pair.changed; bits != 0; bits &= bits - 1)
        if (magnitude_bin(values[trailing_zeros(bits)]) == lowest) ties |= bits & (~bits + 1);
    return ties;
}

// Return the number of elements in the lowest bin in a group of a part. A team is a block.
template <class Team, class Residual>
GRADWIRE_TEAM uint64_t count_ties(Team& team, const Part& part, const Masks& masks, const Residual* residual,
                                  unsigned lowest, uint64_t group) {
    static_assert(Team::kThreads == kGroupWords, "a thread for each word of a group");
    Local<Team, uint64_t> counts;
    team.each([&](unsigned thread) {
        const uint64_t index = group * kGroupWords + thread;
        counts[thread] = popcount(ties_of(part, word_at(masks, index), index, residual, lowest));
    });
    return exclusive_sum(team, counts);
}

// Extract the chosen elements of a group of a part, of which masks.group_first counts the elements in the lowest bin
// before each group and `ties_before` those of the parts before, as +-quantum. Write the words to `kept`. A team is a
// block.
template <class Team, class Residual>
GRADWIRE_TEAM void keep_largest(Team& team, const Part& part, const Masks& masks, Residual* residual,
                                const Selection& selection, uint64_t ties_before, uint64_t group, Residual quantum,
                                MaskPair* kept) {
    Local<Team, uint64_t> before, ties;
    team.each([&](unsigned thread) {
        const uint64_t index = group * kGroupWords + thread;
        ties[thread] = ties_of(part, word_at(masks, index), index, residual, selection.lowest);
        before[thread] = popcount(ties[thread]);
    });
    exclusive_sum(team, before);
    team.each([&](unsigned thread) {
        const uint64_t index = group * kGroupWords + thread;
        const MaskPair pair = word_at(masks, index);
        uint64_t done = ties_before + masks.group_first[group] + before[thread];
        MaskPair own{0, 0};
        for (uint64_t bits = pair.changed; bits != 0; bits &= bits - 1) {
            const uint64_t bit = bits & (~bits + 1);
            Residual& value = residual[element_of_whole(part, index * kWordElements) + trailing_zeros(bits)];
            if (ties[thread] & bit) {
                if (done++ >= selection.ties) continue;
            } else if (magnitude_bin(value) < selection.lowest) {
                continue;
            }
            own.changed |= bit;
            if (value < 0) own.negative |= bit;
            value -= value < 0 ? -quantum : quantum;
        }
        kept[thread] = own;
    });
}

}  // namespace gradwire::cuda
