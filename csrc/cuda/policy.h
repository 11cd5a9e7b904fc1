// What an encoder on a device remembers from step to step, and how its threshold follows: gradwire/policy.py once more,
// so that steps follow each other without the host.
#pragma once

#include <cmath>

#include "../cpu/scalars.h"
#include "masks.h"

namespace gradwire::cuda {

enum class Rule : uint32_t { kFixed = 0, kAdaptive = 1, kStep = 2, kTargetDensity = 3 };

// The numbers of a policy, of the shake-up and of the clip; 0 in `every` means never.
struct Policy {
    Rule rule = Rule::kFixed;
    double minimum = 0;
    double density_min = 0;  // kAdaptive
    double density_max = 1;
    double decay = 0.5;
    double step = 0;  // kStep
    double trigger = 0;
    uint64_t delay = 0;
    double density = 0;  // kTargetDensity
    uint64_t shakeup_every = 0;
    double shakeup_divisor = 1;
    uint64_t clip_every = 0;
    double clip_limit = 0;
};

// Quantiles for kTargetDensity, as in tail.h.
struct TailWords {
    double quantile[4];  // now, shuffled, next, same
    uint64_t elements, agreeing, opposing;
};

struct EncoderState {
    double threshold;  // the policy's, for the next step
    uint64_t step;
    uint64_t changed_at;
    uint16_t rounded;  // the threshold, bfloat16
    uint16_t used;     // what the next step compares with: the rounded one, or the shake-up's
    uint8_t flags;     // of the next message
    uint8_t clips;     // the next step clips
    Nonfinite nonfinite;
    uint64_t clipped_now;  // by the step under way
    double clipped_sum_now;
    TailWords tail;
    // totals
    uint64_t messages;
    uint64_t message_bytes;
    uint64_t sent;
    uint64_t nonfinite_total;
    uint64_t clipped;
    double clipped_sum;
};

inline constexpr double kLargestThreshold = 255.0 * 1329227995784915872903807060280344576.0;  // 255 * 2^120

GRADWIRE_HD inline float threshold_value(uint16_t bits) { return bit_cast<float>(uint32_t{bits} << 16); }

// Nearest-even from float64 in one step; `threshold` is positive, finite and neither too small nor too large.
GRADWIRE_HD inline uint16_t round_threshold(double threshold) {
    int exponent = 0;
    std::frexp(threshold, &exponent);
    exponent = exponent - 8 > -133 ? exponent - 8 : -133;
    const double quanta = std::rint(std::ldexp(threshold, -exponent));
    return static_cast<uint16_t>(bit_cast<uint32_t>(static_cast<float>(std::ldexp(quanta, exponent))) >> 16);
}

// As TargetDensity in policy.py: what repeats and yet was not sent is all of about one magnitude, just below the
// prediction.
constexpr double kRepeated = 0.99;
constexpr double kBelowTies = 31.0 / 32.0;

GRADWIRE_HD inline double predict_quantile(const TailWords& tail, double density) {
    const double now = tail.quantile[0], shuffled = tail.quantile[1], next = tail.quantile[2], same = tail.quantile[3];
    const uint64_t either = tail.agreeing + tail.opposing;
    const double agreement = either > 0 ? static_cast<double>(tail.agreeing) / static_cast<double>(either) : 0.5;
    const double independent = std::fmax(next + (now - shuffled), 0.25 * next);
    const double correlation = std::fmax(std::sin(3.141592653589793 * (agreement - 0.5)), 0.0);
    const double repeats = correlation * correlation;
    const double predicted = std::hypot(std::sqrt(1.0 - repeats) * independent, std::sqrt(repeats) * same);
    return density == 0.0 && agreement >= kRepeated ? predicted * kBelowTies : predicted;
}

GRADWIRE_HD inline double next_threshold(const Policy& policy, const EncoderState& state, double density) {
    const double threshold = state.threshold;
    switch (policy.rule) {
        case Rule::kFixed: break;
        case Rule::kAdaptive:
            if (density < policy.density_min) return std::fmax(threshold * policy.decay, policy.minimum);
            if (density > policy.density_max) return std::fmin(threshold / policy.decay, kLargestThreshold);
            break;
        case Rule::kStep: {
            const double lower = threshold - policy.step;
            const bool waited = state.step + 1 - state.changed_at >= policy.delay;
            if (density < policy.trigger && waited && lower >= policy.minimum) return lower;
            break;
        }
        case Rule::kTargetDensity:
            if (state.tail.elements > 0 && state.tail.quantile[2] > 0)
                return std::fmin(std::fmax(predict_quantile(state.tail, density), policy.minimum), kLargestThreshold);
            break;
    }
    return threshold;
}

// What the next step will do.
GRADWIRE_HD inline void prepare_step(const Policy& policy, EncoderState& state) {
    state.rounded = state.used = round_threshold(state.threshold);
    state.flags = 0;
    if (policy.shakeup_every > 0 && (state.step + 1) % policy.shakeup_every == 0) {
        state.used = round_threshold(state.threshold / policy.shakeup_divisor);
        state.flags = kFlagShakeUp;
    }
    state.clips = policy.clip_every > 0 && (state.step + 1) % policy.clip_every == 0;
}

// The step is over; `count` elements were sent. `follows` is false for a dense message, which teaches nothing.
GRADWIRE_HD inline void finish_step(const Policy& policy, EncoderState& state, uint64_t numel, uint64_t count,
                                    uint64_t message_bytes, bool follows) {
    if (follows && !(state.flags & kFlagShakeUp)) {
        const double density = numel > 0 ? static_cast<double>(count) / static_cast<double>(numel) : 0.0;
        const double next = next_threshold(policy, state, density);
        if (next != state.threshold) {
            state.threshold = next;
            state.changed_at = state.step + 1;
        }
    }
    ++state.step;
    ++state.messages;
    state.message_bytes += message_bytes;
    state.sent += count;
    state.nonfinite_total += state.nonfinite.count;
    state.clipped += state.clipped_now;
    state.clipped_sum += state.clipped_sum_now;
    prepare_step(policy, state);
}

GRADWIRE_HD inline void clear_step(EncoderState& state) {
    state.nonfinite = {0, UINT64_MAX};
    state.clipped_now = 0;
    state.clipped_sum_now = 0;
}

}  // namespace gradwire::cuda
