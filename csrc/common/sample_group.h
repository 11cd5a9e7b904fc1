// The quantile sample of TargetDensity, for host and device: which elements are sampled, the measurement of one group
// of them, and the bins that magnitudes are counted in. docs/algorithm.md derives it.
//
// The loops run over sixteen values, so that every compiler vectorises them, and have no branches, because signs and
// comparisons are unpredictable.
#pragma once

#include <cmath>

#include "scalars.h"

namespace gradwire {

inline constexpr uint64_t kSampleGroup = 16;
inline constexpr unsigned kSampleQuantiles = 4;
inline constexpr uint32_t kInfinityBits = 0x7f800000;  // of a float32; counted magnitudes are below
inline constexpr unsigned kBinShift = 17;              // 64 bins to the octave: the upper 15 bits of a float32
inline constexpr unsigned kBins = kInfinityBits >> kBinShift;

// Sixteen neighbouring elements of the sample. A bit pattern is that of a magnitude as float32. Elements beyond the
// group's count are zero and exceed nothing.
struct SampleGroup {
    uint32_t bits[kSampleQuantiles][kSampleGroup];  // now, shuffled, next, same
    uint32_t exceeding[kSampleQuantiles];           // bit i: element i is finite and at least its cut
    uint32_t agreeing;                              // elements whose residual and update have the same sign
    uint32_t opposing;
    uint32_t moving;  // elements whose sum of residual and update is not zero
};

namespace {

// Return the distance between two sampled groups, in elements. About 640 sampled elements exceed the density's
// quantile. The number of groups is odd, so that it does not fall in step with the rows of a matrix.
inline uint64_t sample_stride(uint64_t numel, double density) {
    constexpr double kExceeding = 640;  // a third of it where the stride is just above 1
    constexpr double kSampledMin = 4096;
    constexpr double kSampledMax = uint64_t{1} << 18;
    double wanted = kExceeding / density;
    if (wanted < kSampledMin) wanted = kSampledMin;
    if (wanted > kSampledMax) wanted = kSampledMax;
    const auto sampled = static_cast<uint64_t>(std::ceil(wanted));
    return ((numel + sampled - 1) / sampled | 1) * kSampleGroup;
}

// Return the first sampled element. From turn to turn all elements are sampled, because a threshold that follows the
// same elements for ever lets others fall behind.
GRADWIRE_HD inline uint64_t first_sampled(uint64_t stride, uint64_t turn) {
    return turn % (stride / kSampleGroup) * kSampleGroup;
}

// Return the lower edge of a bin; past the last bin, the largest float32 instead of infinity.
GRADWIRE_HD inline double bin_edge(unsigned bin) {
    const uint32_t bits = bin << kBinShift;
    return bit_cast<float>(bits < kInfinityBits ? bits : kInfinityBits - 1);
}

// The mean of the magnitudes in the highest bins, in integers, so that every order of the additions gives the same.
// Weights are in halves of the least step of a bin kWeightOctaves below the highest that is filled, `top`; lower bins
// weigh nothing. Sums of 2^18 elements stay below 2^62.
inline constexpr unsigned kWeightOctaves = 30;

GRADWIRE_HD inline uint64_t bin_scale(unsigned bin, unsigned top) {
    const unsigned octaves = top / 64 - bin / 64;
    return octaves > kWeightOctaves ? 0 : uint64_t{1} << (kWeightOctaves - octaves);
}
GRADWIRE_HD inline uint64_t bin_edge_weight(unsigned bin, unsigned top) {
    return 2 * (64 + bin % 64) * bin_scale(bin, top);
}
// Return the weight of an element in the middle of a bin.
GRADWIRE_HD inline uint64_t bin_weight(unsigned bin, unsigned top) {
    return bin_edge_weight(bin, top) + bin_scale(bin, top);
}
// Return whether the mean of the elements in the bins from the top down to this one is at most 32/9 of its lower edge.
// With a rounding point of 9/16 the elements hold two thresholds on the average.
GRADWIRE_HD inline bool is_even(uint64_t elements, uint64_t weight, unsigned bin, unsigned top) {
    return 9 * weight <= 32 * elements * bin_edge_weight(bin, top);
}
// Return 9/32 of the mean.
GRADWIRE_HD inline double floor_of(uint64_t elements, uint64_t weight, unsigned top) {
    constexpr int kExponent = static_cast<int>(kWeightOctaves) + 127 + 7;
    const double scaled = static_cast<double>(9 * weight) / static_cast<double>(32 * elements);
    return std::ldexp(scaled, static_cast<int>(top / 64) - kExponent);
}

GRADWIRE_HD inline float copy_sign(float magnitude, float sign) { return __builtin_copysignf(magnitude, sign); }
GRADWIRE_HD inline double copy_sign(double magnitude, double sign) { return __builtin_copysign(magnitude, sign); }

template <class Residual>
GRADWIRE_HD inline uint32_t magnitude_bits(Residual value) {
    return bit_cast<uint32_t>(static_cast<float>(absolute(value)));
}

// Return what pass 1 leaves of a sum.
template <class Residual>
GRADWIRE_HD inline Residual extract_from(Residual sum, Levels<Residual> levels) {
    const Residual less = sum - copy_sign(levels.quantum, sum);
    return absolute(sum) >= levels.bound ? less : sum;
}

template <class Residual>
GRADWIRE_HD inline Residual sum_of_finite(Residual before, Residual added) {
    const Residual sum = before + added;
    return is_finite(sum) ? sum : is_finite(before) ? before : is_finite(added) ? added : Residual{0};
}

GRADWIRE_HD inline bool is_any_infinite(const uint32_t* bits) {
    uint32_t most = 0;
    for (uint64_t i = 0; i < kSampleGroup; ++i) most = bits[i] > most ? bits[i] : most;
    return most >= kInfinityBits;
}

GRADWIRE_HD inline uint32_t exceeding(const uint32_t* bits, uint32_t cut) {
    uint32_t mask = 0;
    for (uint64_t i = 0; i < kSampleGroup; ++i)
        mask |= static_cast<uint32_t>(bits[i] - cut < kInfinityBits - cut)
                << i;  // below the cut the difference wraps around
    return mask;
}

template <class Residual>
GRADWIRE_HD inline void count_signs(const Residual* before, const Residual* added, SampleGroup* out) {
    uint32_t agreeing = 0;
    uint32_t opposing = 0;
    for (uint64_t i = 0; i < kSampleGroup; ++i) {
        const uint32_t plus = before[i] > 0, minus = before[i] < 0;
        const uint32_t adds = added[i] > 0, subtracts = added[i] < 0;
        agreeing += (plus & adds) | (minus & subtracts);
        opposing += (plus & subtracts) | (minus & adds);
    }
    out->agreeing = agreeing;
    out->opposing = opposing;
}

GRADWIRE_HD inline uint32_t count_moving(const uint32_t* bits) {
    uint32_t moving = 0;
    for (uint64_t i = 0; i < kSampleGroup; ++i) moving += bits[i] != 0;
    return moving;
}

// Measure a step without an update, where the four magnitudes of an element are equal: fill the first only, and count
// no signs.
template <class Residual>
void measure_residuals(const Residual* before, uint64_t count, uint32_t cut, SampleGroup* out) {
    for (uint64_t i = 0; i < kSampleGroup; ++i) out->bits[0][i] = magnitude_bits(before[i]);
    out->exceeding[0] = exceeding(out->bits[0], cut) & ((1U << count) - 1);
    out->moving = count_moving(out->bits[0]);
}

// Measure a group of `count` elements: fill `out`, with one cut (1 or more) for each quantile.
template <class Residual>
GRADWIRE_HD void measure_group(const Residual* before, const Residual* added, uint64_t count, Levels<Residual> levels,
                               bool has_update, const uint32_t* cuts, SampleGroup* out) {
    // An element's partner is eight places away, or the element itself at the end of the array.
    Residual partner[kSampleGroup];
    for (uint64_t i = 0; i < kSampleGroup; ++i) partner[i] = added[i ^ 8];
    for (uint64_t i = count > 8 ? count - 8 : 0; i < 8; ++i) partner[i] = added[i];
    Residual after[kSampleGroup];
    for (uint64_t i = 0; i < kSampleGroup; ++i) {
        const Residual sum = before[i] + added[i];
        out->bits[0][i] = magnitude_bits(sum);
        after[i] = extract_from(sum, levels);
    }
    if (is_any_infinite(out->bits[0]))
        for (uint64_t i = 0; i < kSampleGroup; ++i) after[i] = extract_from(sum_of_finite(before[i], added[i]), levels);
    // The effect of an update that the caller has already added is unknown: expect the same residual again.
    if (!has_update)
        for (uint64_t i = 0; i < kSampleGroup; ++i) after[i] = before[i];
    for (uint64_t i = 0; i < kSampleGroup; ++i) {
        out->bits[1][i] = magnitude_bits(before[i] + partner[i]);
        out->bits[2][i] = magnitude_bits(after[i] + partner[i]);
        out->bits[3][i] = magnitude_bits(after[i] + added[i]);
    }
    const uint32_t elements = (1U << count) - 1;
    for (unsigned q = 0; q < kSampleQuantiles; ++q) out->exceeding[q] = exceeding(out->bits[q], cuts[q]) & elements;
    count_signs(before, added, out);
    out->moving = count_moving(out->bits[0]);
}

}  // namespace
}  // namespace gradwire
