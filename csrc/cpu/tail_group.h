// One group of the sample by which TargetDensity steers. Plain loops over sixteen values, which every compiler turns
// into vectors; no branches, since signs and comparisons are as good as random.
#pragma once

#include "kernels.h"
#include "scalars.h"

namespace gradwire {
namespace {

GRADWIRE_HD inline float copy_sign(float magnitude, float sign) { return __builtin_copysignf(magnitude, sign); }
GRADWIRE_HD inline double copy_sign(double magnitude, double sign) { return __builtin_copysign(magnitude, sign); }

template <class Residual>
GRADWIRE_HD inline uint32_t magnitude_bits(Residual value) {
    return bit_cast<uint32_t>(static_cast<float>(absolute(value)));
}

// What pass 1 leaves of a sum.
template <class Residual>
GRADWIRE_HD inline Residual take_from(Residual sum, Residual threshold) {
    const Residual less = sum - copy_sign(threshold, sum);
    return absolute(sum) >= threshold ? less : sum;
}

template <class Residual>
GRADWIRE_HD inline Residual sum_of_finite(Residual before, Residual added) {
    const Residual sum = before + added;
    return is_finite(sum) ? sum : is_finite(before) ? before : is_finite(added) ? added : Residual{0};
}

GRADWIRE_HD inline bool is_any_infinite(const uint32_t* bits) {
    uint32_t most = 0;
    for (uint64_t i = 0; i < kTailGroup; ++i) most = bits[i] > most ? bits[i] : most;
    return most >= kTailInfinity;
}

GRADWIRE_HD inline uint32_t exceeding(const uint32_t* bits, uint32_t cut) {
    uint32_t mask = 0;
    for (uint64_t i = 0; i < kTailGroup; ++i)
        mask |= static_cast<uint32_t>(bits[i] - cut < kTailInfinity - cut) << i;  // less than the cut wraps around
    return mask;
}

template <class Residual>
GRADWIRE_HD inline void count_signs(const Residual* before, const Residual* added, TailGroup* out) {
    uint32_t agreeing = 0;
    uint32_t opposing = 0;
    for (uint64_t i = 0; i < kTailGroup; ++i) {
        const uint32_t plus = before[i] > 0, minus = before[i] < 0;
        const uint32_t adds = added[i] > 0, subtracts = added[i] < 0;
        agreeing += (plus & adds) | (minus & subtracts);
        opposing += (plus & subtracts) | (minus & adds);
    }
    out->agreeing = agreeing;
    out->opposing = opposing;
}

// For a step without an update, where all four magnitudes of an element are the same: the first's part of `out`.
template <class Residual>
void measure_residuals(const Residual* before, uint64_t count, uint32_t cut, TailGroup* out) {
    for (uint64_t i = 0; i < kTailGroup; ++i) out->bits[0][i] = magnitude_bits(before[i]);
    out->exceeding[0] = exceeding(out->bits[0], cut) & ((1U << count) - 1);
}

template <class Residual>
GRADWIRE_HD void measure_group(const Residual* before, const Residual* added, uint64_t count, Residual threshold,
                               bool has_update, const uint32_t* cuts, TailGroup* out) {
    // An element's partner is the one eight further or back, where there is one.
    Residual partner[kTailGroup];
    for (uint64_t i = 0; i < kTailGroup; ++i) partner[i] = added[i ^ 8];
    for (uint64_t i = count > 8 ? count - 8 : 0; i < 8; ++i) partner[i] = added[i];
    Residual after[kTailGroup];
    for (uint64_t i = 0; i < kTailGroup; ++i) {
        const Residual sum = before[i] + added[i];
        out->bits[0][i] = magnitude_bits(sum);
        after[i] = take_from(sum, threshold);
    }
    if (is_any_infinite(out->bits[0]))
        for (uint64_t i = 0; i < kTailGroup; ++i) after[i] = take_from(sum_of_finite(before[i], added[i]), threshold);
    // Where the caller has added its update already, what an update does is unknown: expect the same again.
    if (!has_update)
        for (uint64_t i = 0; i < kTailGroup; ++i) after[i] = before[i];
    for (uint64_t i = 0; i < kTailGroup; ++i) {
        out->bits[1][i] = magnitude_bits(before[i] + partner[i]);
        out->bits[2][i] = magnitude_bits(after[i] + partner[i]);
        out->bits[3][i] = magnitude_bits(after[i] + added[i]);
    }
    const uint32_t elements = (1U << count) - 1;
    for (unsigned q = 0; q < kTailQuantiles; ++q) out->exceeding[q] = exceeding(out->bits[q], cuts[q]) & elements;
    count_signs(before, added, out);
}

}  // namespace
}  // namespace gradwire
