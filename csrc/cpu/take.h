// Pass 1, written once over the vectors of an instruction set.
//
// For every element: residual += update; if |residual| >= threshold, residual -= +-threshold and the element's bit is
// set. Bytes that must move: the update read, the residual read and written (12 per float32 element). Nothing branches
// on the data but the exceptional word that holds a non-finite value.
//
// `Lanes` is the vector type of a residual: Scalar, Vector, Flags (gathers "not finite"), kLanes, and load, store, add,
// passing, negative, note_nonfinite, any_nonfinite, take (and add_signed, for decoding). `Update` loads kLanes updates,
// converted exactly.
#pragma once

#include "bits.h"
#include "kernels.h"
#include "scalars.h"

namespace gradwire {
namespace {

// The 64 elements of a word that holds a non-finite value, one by one. A value that is not finite is left out: the
// update's (or an overflowing sum) when the residual is sound, otherwise the residual's.
template <class Scalar, class UpdateScalar>
MaskWord take_nonfinite_word(Scalar* residual, const UpdateScalar* update, Scalar threshold, uint64_t word,
                             Taken* taken) {
    MaskWord mask{word, 0, 0};
    for (unsigned i = 0; i < 64; ++i) {
        const Scalar before = residual[i];
        const Scalar added = update ? to_scalar<Scalar>(update[i]) : Scalar{0};
        Scalar sum = update ? before + added : before;
        if (!is_finite(sum)) {
            if (taken->nonfinite++ == 0) taken->first_nonfinite = word * 64 + i;
            sum = is_finite(before) ? before : is_finite(added) ? added : Scalar{0};
        }
        if (absolute(sum) >= threshold) {
            mask.changed |= uint64_t{1} << i;
            if (sum < 0) mask.negative |= uint64_t{1} << i;
            sum -= sum < 0 ? -threshold : threshold;
        }
        residual[i] = sum;
    }
    return mask;
}

inline void list_word(const MaskWord& word, MaskWord* out, Taken* taken) {
    out[taken->words] = word;
    taken->words += word.changed != 0;
    taken->count += popcount(word.changed);
}

template <class Lanes, class Update>
void take_words(typename Lanes::Scalar* residual, const void* update, uint64_t words, typename Lanes::Scalar threshold,
                uint64_t first_word, MaskWord* out, Taken* taken) {
    using Vector = typename Lanes::Vector;
    constexpr unsigned kVectors = 64 / Lanes::kLanes;
    const auto* u = static_cast<const typename Update::Scalar*>(update);
    const Vector t = Lanes::broadcast(threshold);
    Taken so_far = *taken;  // in registers
    for (uint64_t w = 0; w < words; ++w, residual += 64, u += 64) {
        Vector sum[kVectors];
        typename Lanes::Flags flags = Lanes::no_flags();
#pragma GCC unroll 64
        for (unsigned v = 0; v < kVectors; ++v) {
            sum[v] = Lanes::add(Lanes::load(residual + v * Lanes::kLanes), Update::load(u + v * Lanes::kLanes));
            Lanes::note_nonfinite(flags, sum[v]);
        }
        MaskWord word{first_word + w, 0, 0};
        if (__builtin_expect(Lanes::any_nonfinite(flags), 0)) {
            word = take_nonfinite_word(residual, u, threshold, word.index, &so_far);
        } else {
#pragma GCC unroll 64
            for (unsigned v = 0; v < kVectors; ++v) {
                const auto passing = Lanes::passing(sum[v], t);
                word.changed |= Lanes::bits(passing) << (v * Lanes::kLanes);
                word.negative |= Lanes::negative(sum[v]) << (v * Lanes::kLanes);
                Lanes::store(residual + v * Lanes::kLanes, Lanes::take(sum[v], passing, t));
            }
            word.negative &= word.changed;
        }
        list_word(word, out, &so_far);
    }
    *taken = so_far;
}

// The same where the caller has already added the update: reads the residual once and writes only what is taken.
template <class Lanes>
void take_words_accumulated(typename Lanes::Scalar* residual, const void*, uint64_t words,
                            typename Lanes::Scalar threshold, uint64_t first_word, MaskWord* out, Taken* taken) {
    using Vector = typename Lanes::Vector;
    using Scalar = typename Lanes::Scalar;
    constexpr unsigned kVectors = 64 / Lanes::kLanes;
    const Vector t = Lanes::broadcast(threshold);
    Taken so_far = *taken;
    for (uint64_t w = 0; w < words; ++w, residual += 64) {
        typename Lanes::Flags flags = Lanes::no_flags();
        MaskWord word{first_word + w, 0, 0};
#pragma GCC unroll 64
        for (unsigned v = 0; v < kVectors; ++v) {
            const Vector value = Lanes::load(residual + v * Lanes::kLanes);
            Lanes::note_nonfinite(flags, value);
            word.changed |= Lanes::bits(Lanes::passing(value, t)) << (v * Lanes::kLanes);
        }
        if (__builtin_expect(Lanes::any_nonfinite(flags), 0)) {
            word = take_nonfinite_word<Scalar, Scalar>(residual, nullptr, threshold, word.index, &so_far);
        } else if (word.changed != 0) {
#pragma GCC unroll 64
            for (unsigned v = 0; v < kVectors; ++v) {
                const Vector value = Lanes::load(residual + v * Lanes::kLanes);
                word.negative |= Lanes::negative(value) << (v * Lanes::kLanes);
                Lanes::store(residual + v * Lanes::kLanes, Lanes::take(value, Lanes::passing(value, t), t));
            }
            word.negative &= word.changed;
        }
        list_word(word, out, &so_far);
    }
    *taken = so_far;
}

}  // namespace
}  // namespace gradwire
