// The state of an encoder on a device and the policies of its threshold: gradwire/policy.py for the device, so that
// steps follow each other without the host.
#pragma once

#include <cmath>

#include "../common/format.h"
#include "../common/scalars.h"
#include "masks.h"

namespace gradwire::cuda {

enum class Rule : uint32_t { kFixed = 0, kAdaptive = 1, kStep = 2, kTargetDensity = 3 };

// The numbers of a policy and of the schedules; 0 in `every` means never.
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

// The sample of kTargetDensity (SampledQuantiles in quantile_sample.h).
struct SampleTotals {
    double quantile[4];  // now, shuffled, next, same
    uint64_t elements, agreeing, opposing;
};

struct EncoderState {
    double threshold;  // the policy's, for the next step
    uint64_t step;
    uint64_t changed_at;
    uint16_t rounded;  // the threshold, bfloat16
    uint16_t used;     // the threshold of the next message: the rounded one, or that of a shake-up
    uint8_t flags;     // of the next message
    uint8_t clips;     // whether the next step clips
    Nonfinite nonfinite;
    uint64_t clipped_now;  // by the current step
    double clipped_sum_now;
    SampleTotals sample;
    // totals
    uint64_t messages;
    uint64_t message_bytes;
    uint64_t sent;
    uint64_t nonfinite_total;
    uint64_t clipped;
    double clipped_sum;
};

inline constexpr double kLargestThreshold = 255.0 * 1329227995784915872903807060280344576.0;  // 255 * 2^120

// Round float64 to bfloat16, to nearest-even, in one step. `threshold` is in the range of bfloat16.
GRADWIRE_HD inline uint16_t round_threshold(double threshold) {
    int exponent = 0;
    std::frexp(threshold, &exponent);
    exponent = exponent - 8 > -133 ? exponent - 8 : -133;
    const double quanta = std::rint(std::ldexp(threshold, -exponent));
    return static_cast<uint16_t>(bit_cast<uint32_t>(static_cast<float>(std::ldexp(quanta, exponent))) >> 16);
}

// As in policy.py: elements that repeat although none was sent all have about the same magnitude, just below the
// prediction.
constexpr double kRepeated = 0.99;
constexpr double kBelowTies = 31.0 / 32.0;

GRADWIRE_HD inline double predict_quantile(const SampleTotals& sample, double density) {
    const double now = sample.quantile[0], shuffled = sample.quantile[1];
    const double next = sample.quantile[2], same = sample.quantile[3];
    const uint64_t either = sample.agreeing + sample.opposing;
    const double agreement = either > 0 ? static_cast<double>(sample.agreeing) / static_cast<double>(either) : 0.5;
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
            if (state.sample.elements > 0 && state.sample.quantile[2] > 0)
                return std::fmin(std::fmax(predict_quantile(state.sample, density), policy.minimum), kLargestThreshold);
            break;
    }
    return threshold;
}

// Prepare the next step: its threshold, its flags, and whether it clips.
GRADWIRE_HD inline void prepare_step(const Policy& policy, EncoderState& state) {
    state.rounded = state.used = round_threshold(state.threshold);
    state.flags = 0;
    if (policy.shakeup_every > 0 && (state.step + 1) % policy.shakeup_every == 0) {
        state.used = round_threshold(state.threshold / policy.shakeup_divisor);
        state.flags = kFlagShakeUp;
    }
    state.clips = policy.clip_every > 0 && (state.step + 1) % policy.clip_every == 0;
}

// Finish a step that sent `count` elements. `follows` is false for a dense message, which does not feed the policy.
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
