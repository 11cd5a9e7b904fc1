// The plan of pass 2, from a scan of the groups' counts. It stays on the device; the host needs none of its numbers.
#pragma once

#include "masks.h"

namespace gradwire::cuda {

struct Plan {
    uint64_t count;  // changed elements of the message
    uint64_t chunks;
    uint64_t directory_bytes;
    uint64_t stream_bits;
    uint32_t exponent;
    uint32_t restores;  // 1: the update was not finite, so the message is empty and pass 1 is undone

    GRADWIRE_HD uint64_t payload_bytes() const { return directory_bytes + (stream_bits + 7) / 8; }
    GRADWIRE_HD uint64_t changed_in(uint64_t chunk) const {
        const uint64_t before = chunk << exponent;
        const uint64_t left = count - before;
        return left < uint64_t{1} << exponent ? left : uint64_t{1} << exponent;
    }
};

// Return the most chunks of any message of `numel` elements: 2^e is about four times the square root of the count.
GRADWIRE_HD inline constexpr uint64_t most_chunks(uint64_t numel) {
    const unsigned bits = bit_length(numel > 0 ? numel - 1 : 0);
    const uint64_t chunks = uint64_t{1} << ((bits + 1) / 2 > 2 ? (bits + 1) / 2 - 2 : 0);
    return chunks > 32 ? chunks : 32;
}

inline constexpr unsigned kScanItems = 8;  // groups per thread and round

// A team is a block, the only one.
template <class Team>
GRADWIRE_TEAM void plan_message(Team& team, const Masks& masks, const Nonfinite& nonfinite, bool skip_nonfinite,
                                Plan* plan) {
    const uint64_t groups = masks.group_total();
    uint64_t before = 0;
    for (uint64_t base = 0; base < groups; base += Team::kThreads * kScanItems) {
        Local<Team, uint64_t> sums;
        team.each([&](unsigned thread) {
            sums[thread] = 0;
            for (unsigned i = 0; i < kScanItems; ++i) {
                const uint64_t group = base + thread * kScanItems + i;
                if (group < groups) sums[thread] += masks.group_count[group];
            }
        });
        const uint64_t all = exclusive_sum(team, sums);
        team.each([&](unsigned thread) {
            uint64_t first = before + sums[thread];
            for (unsigned i = 0; i < kScanItems; ++i) {
                const uint64_t group = base + thread * kScanItems + i;
                if (group >= groups) break;
                masks.group_first[group] = first;
                first += masks.group_count[group];
            }
        });
        before += all;
    }
    team.each([&](unsigned thread) {
        if (thread > 0) return;
        masks.group_first[groups] = before;
        const bool restores = nonfinite.count > 0 && !skip_nonfinite;
        const uint64_t count = restores ? 0 : before;
        const unsigned exponent = chunk_exponent(count);
        const uint64_t per_chunk = uint64_t{1} << exponent;
        *plan = {count, (count + per_chunk - 1) / per_chunk, 0, 0, exponent, restores};
    });
}

}  // namespace gradwire::cuda
