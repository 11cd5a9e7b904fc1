// The output of pass 1 in device memory: which elements changed, in at most 2 bits per element.
//
// Elements are cut into tiles of 32 words of 64 elements. The changed words of a tile are stored one after the other in
// the tile's slot, and a summary lists them: at density 1e-3 a tile takes 40 bytes instead of 512. A block processes a
// group of 8 tiles; the counts of the groups are scanned.
#pragma once

#include <cstdint>

#include "bits.h"

namespace gradwire::cuda {

inline constexpr uint64_t kWordElements = 64;
inline constexpr uint64_t kTileWords = 32;
inline constexpr uint64_t kTileElements = kTileWords * kWordElements;
inline constexpr uint64_t kGroupTiles = 8;
inline constexpr uint64_t kGroupWords = kGroupTiles * kTileWords;
inline constexpr uint64_t kGroupElements = kGroupTiles * kTileElements;

struct alignas(16) MaskPair {
    uint64_t changed;
    uint64_t negative;  // a subset
};
struct alignas(8) TileRecord {
    uint32_t count;    // changed elements
    uint32_t summary;  // bit i: word i of the tile is listed
};

struct Masks {
    uint64_t numel;
    TileRecord* tiles;
    MaskPair* pairs;        // kTileWords slots for each tile
    uint32_t* group_count;  // changed elements of each group
    uint64_t* group_first;  // changed elements of all groups before it, and of all groups at the end

    GRADWIRE_HD uint64_t tile_count() const { return (numel + kTileElements - 1) / kTileElements; }
    GRADWIRE_HD uint64_t group_total() const { return (numel + kGroupElements - 1) / kGroupElements; }
    GRADWIRE_HD const MaskPair& listed(uint64_t tile, uint32_t summary, unsigned word) const {
        return pairs[tile * kTileWords + popcount(summary & static_cast<uint32_t>(low_bits(word)))];
    }
};

// The elements of one encode that were left out because they are not finite.
struct Nonfinite {
    uint64_t count;
    uint64_t first;  // UINT64_MAX where there are none
};

}  // namespace gradwire::cuda
