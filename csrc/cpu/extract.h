// Pass 1: accumulate the update and extract +-threshold. Written once over the vectors of an instruction set.
//
// For every element: residual += update; if |residual| >= bound, residual -= +-quantum and the element's bit is set.
// Memory traffic: the update is read, the residual read and written (12 bytes per float32 element). The only
// branch on the data is for a word that holds a non-finite value.
//
// `Lanes` is the vector type of a residual: Scalar, Vector, Flags (collects "not finite"), kLanes, and load, store,
// add, passing, negative, note_nonfinite, any_nonfinite, extract (and add_signed, for decoding). `Update` loads kLanes
// updates, converted exactly.
#pragma once

#include "../common/scalars.h"
#include "bits.h"
#include "kernels.h"

namespace gradwire {
namespace {

// Process the 64 elements of a word that holds a non-finite value one by one. Where the sum is not finite, keep the
// residual if it is finite, otherwise the update if that is.
template <class Scalar, class UpdateScalar>
MaskWord extract_nonfinite_word(Scalar* residual, const UpdateScalar* update, Levels<Scalar> levels, uint64_t word,
                                Extracted* extracted) {
    MaskWord mask{word, 0, 0};
    for (unsigned i = 0; i < 64; ++i) {
        const Scalar before = residual[i];
        const Scalar added = update ? to_scalar<Scalar>(update[i]) : Scalar{0};
        Scalar sum = update ? before + added : before;
        if (!is_finite(sum)) {
            if (extracted->nonfinite++ == 0) extracted->first_nonfinite = word * 64 + i;
            sum = is_finite(before) ? before : is_finite(added) ? added : Scalar{0};
        }
        if (absolute(sum) >= levels.bound) {
            mask.changed |= uint64_t{1} << i;
            if (sum < 0) mask.negative |= uint64_t{1} << i;
            sum -= sum < 0 ? -levels.quantum : levels.quantum;
        }
        residual[i] = sum;
    }
    return mask;
}

inline void list_word(const MaskWord& word, MaskWord* out, Extracted* extracted) {
    out[extracted->words] = word;
    extracted->words += word.changed != 0;
    extracted->count += popcount(word.changed);
}

template <class Lanes, class Update>
void extract_words(typename Lanes::Scalar* residual, const void* update, uint64_t words,
                   Levels<typename Lanes::Scalar> levels, uint64_t first_word, MaskWord* out, Extracted* extracted) {
    using Vector = typename Lanes::Vector;
    constexpr unsigned kVectors = 64 / Lanes::kLanes;
    const auto* u = static_cast<const typename Update::Scalar*>(update);
    const Vector bound = Lanes::broadcast(levels.bound);
    const Vector quantum = Lanes::broadcast(levels.quantum);
    Extracted so_far = *extracted;  // in registers
    for (uint64_t w = 0; w < words; ++w, residual += 64, u += 64) {
        Vector sum[kVectors];
        typename Lanes::Flags flags = Lanes::no_flags();
#pragma GCC unroll 64
        for (unsigned v = 0; v < kVectors; ++v) {
            prefetch_ahead(residual + v * Lanes::kLanes);
            prefetch_ahead(u + v * Lanes::kLanes);
            sum[v] = Lanes::add(Lanes::load(residual + v * Lanes::kLanes), Update::load(u + v * Lanes::kLanes));
            Lanes::note_nonfinite(flags, sum[v]);
        }
        MaskWord word{first_word + w, 0, 0};
        if (__builtin_expect(Lanes::any_nonfinite(flags), 0)) {
            word = extract_nonfinite_word(residual, u, levels, word.index, &so_far);
        } else {
#pragma GCC unroll 64
            for (unsigned v = 0; v < kVectors; ++v) {
                const auto passing = Lanes::passing(sum[v], bound);
                word.changed |= Lanes::bits(passing) << (v * Lanes::kLanes);
                word.negative |= Lanes::negative(sum[v]) << (v * Lanes::kLanes);
                Lanes::store(residual + v * Lanes::kLanes, Lanes::extract(sum[v], passing, quantum));
            }
            word.negative &= word.changed;
        }
        list_word(word, out, &so_far);
    }
    *extracted = so_far;
}

// The same for an update that the caller has already added: read the residual once and write only the words that
// changed.
template <class Lanes>
void extract_words_accumulated(typename Lanes::Scalar* residual, const void*, uint64_t words,
                               Levels<typename Lanes::Scalar> levels, uint64_t first_word, MaskWord* out,
                               Extracted* extracted) {
    using Vector = typename Lanes::Vector;
    using Scalar = typename Lanes::Scalar;
    constexpr unsigned kVectors = 64 / Lanes::kLanes;
    const Vector bound = Lanes::broadcast(levels.bound);
    const Vector quantum = Lanes::broadcast(levels.quantum);
    Extracted so_far = *extracted;
    for (uint64_t w = 0; w < words; ++w, residual += 64) {
        typename Lanes::Flags flags = Lanes::no_flags();
        MaskWord word{first_word + w, 0, 0};
#pragma GCC unroll 64
        for (unsigned v = 0; v < kVectors; ++v) {
            prefetch_ahead(residual + v * Lanes::kLanes);
            const Vector value = Lanes::load(residual + v * Lanes::kLanes);
            Lanes::note_nonfinite(flags, value);
            word.changed |= Lanes::bits(Lanes::passing(value, bound)) << (v * Lanes::kLanes);
        }
        if (__builtin_expect(Lanes::any_nonfinite(flags), 0)) {
            word = extract_nonfinite_word<Scalar, Scalar>(residual, nullptr, levels, word.index, &so_far);
        } else if (word.changed != 0) {
#pragma GCC unroll 64
            for (unsigned v = 0; v < kVectors; ++v) {
                const Vector value = Lanes::load(residual + v * Lanes::kLanes);
                word.negative |= Lanes::negative(value) << (v * Lanes::kLanes);
                Lanes::store(residual + v * Lanes::kLanes,
                             Lanes::extract(value, Lanes::passing(value, bound), quantum));
            }
            word.negative &= word.changed;
        }
        list_word(word, out, &so_far);
    }
    *extracted = so_far;
}

// The same for the difference of two arrays, of which nothing is kept: read both once (8 bytes per float32 element).
template <class Lanes>
void extract_difference(const typename Lanes::Scalar* now, const typename Lanes::Scalar* before, uint64_t words,
                        Levels<typename Lanes::Scalar> levels, uint64_t first_word, MaskWord* out,
                        Extracted* extracted) {
    using Vector = typename Lanes::Vector;
    using Scalar = typename Lanes::Scalar;
    const Vector bound = Lanes::broadcast(levels.bound);
    Extracted so_far = *extracted;
    for (uint64_t w = 0; w < words; ++w, now += 64, before += 64) {
        typename Lanes::Flags flags = Lanes::no_flags();
        MaskWord word{first_word + w, 0, 0};
#pragma GCC unroll 64
        for (unsigned at = 0; at < 64; at += Lanes::kLanes) {
            prefetch_ahead(now + at);
            prefetch_ahead(before + at);
            const Vector value = Lanes::subtract(Lanes::load(now + at), Lanes::load(before + at));
            Lanes::note_nonfinite(flags, value);
            word.changed |= Lanes::bits(Lanes::passing(value, bound)) << at;
            word.negative |= Lanes::negative(value) << at;
        }
        word.negative &= word.changed;
        if (__builtin_expect(Lanes::any_nonfinite(flags), 0)) {
            Scalar values[64];
            for (unsigned i = 0; i < 64; ++i) values[i] = now[i] - before[i];
            word = extract_nonfinite_word<Scalar, Scalar>(values, nullptr, levels, word.index, &so_far);
        }
        list_word(word, out, &so_far);
    }
    *extracted = so_far;
}

}  // namespace
}  // namespace gradwire
