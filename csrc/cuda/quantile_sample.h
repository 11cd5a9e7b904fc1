// The quantile sample of TargetDensity on a device, with the groups, bins and quantiles of the CPU. The CPU counts a
// window of bins; here all bins are counted, which gives the same quantiles.
#pragma once

#include "../common/sample_group.h"
#include "policy.h"
#include "update_arrays.h"

namespace gradwire::cuda {

GRADWIRE_HD inline void count_one(uint32_t* bin) {
#if defined(__CUDA_ARCH__)
    atomicAdd(bin, 1U);
#else
    ++*bin;
#endif
}

// Measure one group, by one thread. `bins` are kSampleQuantiles times kBins; `updates` may be empty.
template <class Residual>
GRADWIRE_HD void sample_group(const Residual* residual, const ArrayTable& updates, uint64_t first, uint64_t numel,
                              Levels<Residual> levels, uint32_t* bins, SampleTotals* sample) {
    const uint64_t count = numel - first < kSampleGroup ? numel - first : kSampleGroup;
    Residual before[kSampleGroup] = {};
    Residual added[kSampleGroup] = {};
    unsigned array = updates.count > 0 ? updates.find(first) : 0;
    for (uint64_t i = 0; i < count; ++i) {
        before[i] = residual[first + i];
        if (updates.count == 0) continue;
        while (updates.arrays[array].end <= first + i) ++array;
        added[i] = value_of<Residual>(updates.arrays[array].data, first + i - updates.first_of(array),
                                      static_cast<Dtype>(updates.dtypes[array]));
    }
    SampleGroup group;
    const uint32_t cuts[kSampleQuantiles] = {1, 1, 1, 1};
    measure_group(before, added, count, levels, updates.count > 0, cuts, &group);
    for (unsigned q = 0; q < kSampleQuantiles; ++q)
        for (uint64_t i = 0; i < count; ++i)
            if (group.exceeding[q] >> i & 1) count_one(bins + q * kBins + (group.bits[q][i] >> kBinShift));
    atomic_add(&sample->elements, count);
    atomic_add(&sample->agreeing, group.agreeing);
    atomic_add(&sample->opposing, group.opposing);
    atomic_add(&sample->still, count - group.moving);
}

// Find one quantile, by one block, from its bins, highest bin first. Clear the bins for the next step. With `floor`
// also find the floor, or 0 where the quantile can be followed: `_floor` in python/gradwire/reference.py.
template <class Team>
GRADWIRE_TEAM void find_quantile(Team& team, uint32_t* bins, double want, double* quantile, double* floor = nullptr) {
    team.each([&](unsigned thread) {
        if (thread > 0) return;
        *quantile = bin_edge(0);
        if (floor) *floor = 0;
    });
    constexpr unsigned kRounds = (kBins + Team::kThreads - 1) / Team::kThreads;
    uint64_t above = 0, weight_above = 0;
    unsigned top = 0;
    bool found = false;
    for (unsigned round = 0; round < kRounds; ++round) {
        Local<Team, uint64_t> before, own;
        team.each([&](unsigned thread) {
            const unsigned from_top = round * Team::kThreads + thread;
            before[thread] = own[thread] = 0;
            if (from_top >= kBins) return;
            before[thread] = own[thread] = bins[kBins - 1 - from_top];
            bins[kBins - 1 - from_top] = 0;
        });
        const uint64_t all = exclusive_sum(team, before);
        if (floor && !found && all > 0) {
            const auto bin_of = [&](unsigned thread) { return kBins - 1 - (round * Team::kThreads + thread); };
            if (above == 0) {
                Local<Team, uint64_t> filled;
                team.each([&](unsigned thread) { filled[thread] = own[thread] > 0 ? bin_of(thread) : 0; });
                top = static_cast<unsigned>(team.exclusive_scan(filled, uint64_t{0}, Most{}));
            }
            Local<Team, uint64_t> weight, even;
            team.each([&](unsigned thread) {
                weight[thread] = own[thread] > 0 ? own[thread] * bin_weight(bin_of(thread), top) : 0;
            });
            const uint64_t weight_all = exclusive_sum(team, weight);
            const auto weight_down_to = [&](unsigned thread) {
                return weight_above + weight[thread] + own[thread] * bin_weight(bin_of(thread), top);
            };
            team.each([&](unsigned thread) {
                const uint64_t higher = above + before[thread];
                even[thread] = own[thread] > 0 && static_cast<double>(higher) < want &&
                                       is_even(higher + own[thread], weight_down_to(thread), bin_of(thread), top)
                                   ? UINT64_MAX - bin_of(thread)
                                   : 0;
            });
            const uint64_t lowest = team.exclusive_scan(even, uint64_t{0}, Most{});
            team.each([&](unsigned thread) {
                if (lowest != UINT64_MAX - bin_of(thread)) return;
                const uint64_t elements = above + before[thread] + own[thread];
                const bool is_reached = static_cast<double>(elements) >= want;
                *floor = is_reached ? 0 : floor_of(elements, weight_down_to(thread), top);
            });
            weight_above += weight_all;
        }
        if (!found) {
            // If fewer than `want` elements are counted, the quantile is the lower edge of the lowest bin in use.
            Local<Team, uint64_t> lowest;
            team.each([&](unsigned thread) {
                const unsigned bin = kBins - 1 - (round * Team::kThreads + thread);
                const uint64_t higher = above + before[thread];
                lowest[thread] = own[thread] > 0 ? UINT64_MAX - bin : 0;
                if (own[thread] == 0 || static_cast<double>(higher) >= want ||
                    static_cast<double>(higher + own[thread]) < want)
                    return;
                const double low = bin_edge(bin), high = bin_edge(bin + 1);
                *quantile =
                    high - (high - low) * ((want - static_cast<double>(higher)) / static_cast<double>(own[thread]));
            });
            found = all > 0 && static_cast<double>(above + all) >= want;
            const uint64_t least = team.exclusive_scan(lowest, uint64_t{0}, Most{});
            team.each([&](unsigned thread) {
                if (thread == 0 && !found && least > 0) *quantile = bin_edge(static_cast<unsigned>(UINT64_MAX - least));
            });
        }
        above += all;
    }
}

}  // namespace gradwire::cuda
