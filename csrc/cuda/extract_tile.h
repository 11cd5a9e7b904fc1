// Pass 1 over one tile, by one warp: residual += update; where |residual| >= bound, residual -= +-quantum and the
// element's bit is set. The results equal those of cpu/extract.h, bit for bit.
//
// Lane l processes elements 128 v + 4 l ... + 3 of the tile, v = 0 ... 15, so that each load of a warp is one run of
// memory. Memory traffic per float32 element: 4 bytes of the update read, 4 of the residual read and 4 written; masks
// add 16 bytes for each word of 64 elements with a change. The warp waits only for its loads, of which a lane has 8 in
// flight (128 bytes).
#pragma once

#include "../common/partition.h"
#include "update_arrays.h"

namespace gradwire::cuda {

// The type of an update that the caller has already added: the residual is read once and written only where it changes.
struct Accumulated {};

template <class Update>
inline constexpr bool kAdds = true;
template <>
inline constexpr bool kAdds<Accumulated> = false;

struct TileShared {
    // Byte i describes elements 4 i ... 4 i + 3: changed in the lower four bits, negative in the upper.
    alignas(16) uint64_t fours[kTileElements / 32];
};

template <class Residual>
struct ExtractTarget {
    Residual* residual;
    Masks masks;
    Nonfinite* nonfinite;
};

// Extract from one element. Return bit 0: changed, bit 4: negative.
template <class Residual>
GRADWIRE_HD uint32_t extract_element(Residual& sum, Levels<Residual> levels) {
    const bool passes = absolute(sum) >= levels.bound;
    const bool negative = sum < 0;
    if (passes) sum -= negative ? -levels.quantum : levels.quantum;
    return static_cast<uint32_t>(passes) | static_cast<uint32_t>(passes && negative) << 4;
}

// Replace a sum that is not finite: keep the residual if it is finite, otherwise the update if that is.
template <class Residual>
GRADWIRE_HD Residual without_nonfinite(Residual before, Residual added, uint64_t index, Nonfinite* nonfinite) {
    atomic_add(&nonfinite->count, 1);
    atomic_least(&nonfinite->first, index);
    return is_finite(before) ? before : is_finite(added) ? added : Residual{0};
}

// Return the tile's part of the update if it is in one array of type Update and aligned to vectors, otherwise null.
template <class Update>
GRADWIRE_HD const Update* find_whole_tile(const ArrayTable& updates, uint64_t first) {
    const unsigned i = updates.find(first);
    if (static_cast<Dtype>(updates.dtypes[i]) != kDtypeOf<Update>) return nullptr;
    if (updates.arrays[i].end < first + kTileElements) return nullptr;
    const Update* at = static_cast<const Update*>(updates.arrays[i].data) + (first - updates.first_of(i));
    return reinterpret_cast<uintptr_t>(at) % alignof(Four<Update>) == 0 ? at : nullptr;
}

// `first` is the first element of the tile, `update` the tile's update; it is ignored for Accumulated.
template <class Residual, class Update>
GRADWIRE_HD void extract_whole_tile(const ExtractTarget<Residual>& to, const Update* update, Levels<Residual> levels,
                                    uint64_t first, unsigned lane, uint8_t* fours) {
    constexpr unsigned kVectors = sizeof(Residual) == 8 ? 2 : 4;  // in flight at a time
    Residual* residual = to.residual + first;
    for (unsigned begin = 0; begin < kTileElements; begin += kVectors * 128) {
        const unsigned at = begin + 4 * lane;
        Four<Residual> sum[kVectors];
        Four<Residual> added[kVectors];
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
        for (unsigned v = 0; v < kVectors; ++v) sum[v] = load_four(residual + at + 128 * v);
        if constexpr (kAdds<Update>) {
            Four<Update> loaded[kVectors];
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
            for (unsigned v = 0; v < kVectors; ++v) loaded[v] = load_four(update + at + 128 * v);
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
            for (unsigned v = 0; v < kVectors; ++v)
                for (unsigned j = 0; j < 4; ++j) added[v].value[j] = to_scalar<Residual>(loaded[v].value[j]);
        }
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
        for (unsigned v = 0; v < kVectors; ++v) {
            Residual value[4];
            bool sound = true;
            for (unsigned j = 0; j < 4; ++j) {
                value[j] = sum[v].value[j];
                if constexpr (kAdds<Update>) value[j] += added[v].value[j];
                sound &= is_finite(value[j]);
            }
            if (!sound)
                for (unsigned j = 0; j < 4; ++j) {
                    Residual more{0};
                    if constexpr (kAdds<Update>) more = added[v].value[j];
                    if (!is_finite(value[j]))
                        value[j] = without_nonfinite(sum[v].value[j], more, first + at + 128 * v + j, to.nonfinite);
                }
            uint32_t four = 0;
            for (unsigned j = 0; j < 4; ++j) {
                four |= extract_element(value[j], levels) << j;
                sum[v].value[j] = value[j];
            }
            fours[(at + 128 * v) / 4] = static_cast<uint8_t>(four);
            if (kAdds<Update> || four != 0 || !sound) store_four(residual + at + 128 * v, sum[v]);
        }
    }
}

// Any tile: in several arrays, at any alignment, or incomplete at the end of the residual.
template <class Residual, class Update>
GRADWIRE_HD void extract_any_tile(const ExtractTarget<Residual>& to, const ArrayTable& updates, Levels<Residual> levels,
                                  uint64_t first, unsigned lane, uint8_t* fours) {
    unsigned array = kAdds<Update> ? updates.find(first) : 0;
    for (unsigned at = 4 * lane; at < kTileElements; at += 128) {
        uint32_t four = 0;
        for (unsigned j = 0; j < 4; ++j) {
            const uint64_t index = first + at + j;
            if (index >= to.masks.numel) break;
            const Residual before = to.residual[index];
            Residual more{0};
            Residual value = before;
            if constexpr (kAdds<Update>) {
                while (updates.arrays[array].end <= index) ++array;
                more = value_of<Residual>(updates.arrays[array].data, index - updates.first_of(array),
                                          static_cast<Dtype>(updates.dtypes[array]));
                value = before + more;
            }
            const bool finite = is_finite(value);
            if (!finite) value = without_nonfinite(before, more, index, to.nonfinite);
            const uint32_t bits = extract_element(value, levels);
            four |= bits << j;
            if (kAdds<Update> || bits != 0 || !finite) to.residual[index] = value;
        }
        fours[at / 4] = static_cast<uint8_t>(four);
    }
}

// Return word `lane` of the tile, from its sixteen bytes.
GRADWIRE_HD inline MaskPair mask_word(const TileShared& shared, unsigned lane) {
    const uint64_t low = shared.fours[2 * lane];
    const uint64_t high = shared.fours[2 * lane + 1];
    return {pack_nibbles(low) | uint64_t{pack_nibbles(high)} << 32,
            pack_nibbles(low >> 4) | uint64_t{pack_nibbles(high >> 4)} << 32};
}

// Store the words with a change, of which word_of(lane) returns one for each lane, and the tile's record. Return the
// number of changed elements. A team is a warp.
template <class Team, class WordOf>
GRADWIRE_TEAM uint32_t store_words(Team& team, const Masks& masks, uint64_t tile, WordOf word_of) {
    static_assert(Team::kThreads == kTileWords, "a lane for each word");
    Local<Team, uint64_t> counts;
    Local<Team, bool> listed;
    team.each([&](unsigned lane) {
        const uint64_t changed = word_of(lane).changed;
        counts[lane] = popcount(changed);
        listed[lane] = changed != 0;
    });
    const uint32_t summary = team.ballot(listed);
    const auto count = static_cast<uint32_t>(team.sum(counts));
    team.each([&](unsigned lane) {
        if (listed[lane])
            masks.pairs[tile * kTileWords + popcount(summary & static_cast<uint32_t>(low_bits(lane)))] = word_of(lane);
        if (lane == 0) masks.tiles[tile] = {count, summary};
    });
    return count;
}

// A team is a warp. Return the number of changed elements of the tile. `updates` covers the tile unless it is ignored.
template <class Team, class Residual, class Update>
GRADWIRE_TEAM uint32_t extract_tile(Team& team, const ExtractTarget<Residual>& to, const ArrayTable& updates,
                                    Levels<Residual> levels, uint64_t tile, TileShared& shared) {
    const uint64_t first = tile * kTileElements;
    const bool full = first + kTileElements <= to.masks.numel;
    auto* fours = reinterpret_cast<uint8_t*>(shared.fours);
    team.each([&](unsigned lane) {
        if constexpr (kAdds<Update>) {
            const Update* update = full ? find_whole_tile<Update>(updates, first) : nullptr;
            if (update) return extract_whole_tile(to, update, levels, first, lane, fours);
        } else {
            if (full) return extract_whole_tile<Residual, Update>(to, nullptr, levels, first, lane, fours);
        }
        extract_any_tile<Residual, Update>(to, updates, levels, first, lane, fours);
    });
    return store_words(team, to.masks, tile, [&](unsigned lane) { return mask_word(shared, lane); });
}

// Gather a tile of a part from the masks of the whole. Blocks of a partition are whole words. A team is a warp. Return
// the number of changed elements of the tile.
template <class Team>
GRADWIRE_TEAM uint32_t deal_tile(Team& team, const Masks& whole, const Part& part, const Masks& masks, uint64_t tile) {
    return store_words(team, masks, tile, [&](unsigned lane) {
        const uint64_t at = tile * kTileElements + lane * kWordElements;
        if (at >= masks.numel) return MaskPair{0, 0};
        const uint64_t word = element_of_whole(part, at) / kWordElements;
        const uint32_t summary = whole.tiles[word / kTileWords].summary;
        const auto inside = static_cast<unsigned>(word % kTileWords);
        return summary >> inside & 1 ? whole.listed(word / kTileWords, summary, inside) : MaskPair{0, 0};
    });
}

// Undo pass 1 on a tile.
template <class Residual>
GRADWIRE_HD void restore_tile(const Masks& masks, Residual* residual, Residual quantum, uint64_t tile) {
    const uint32_t summary = masks.tiles[tile].summary;
    for (uint64_t words = summary; words != 0; words &= words - 1) {
        const unsigned word = trailing_zeros(words);
        const MaskPair pair = masks.listed(tile, summary, word);
        for (uint64_t bits = pair.changed; bits != 0; bits &= bits - 1) {
            const unsigned i = trailing_zeros(bits);
            residual[tile * kTileElements + word * kWordElements + i] += pair.negative >> i & 1 ? -quantum : quantum;
        }
    }
}

}  // namespace gradwire::cuda
