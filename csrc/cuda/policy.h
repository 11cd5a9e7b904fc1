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
    double rounding_point = 1;  // share of the threshold from which on elements are sent
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

// How many elements move: Supply in policy.py.
enum class Supply : uint32_t { kEnough = 0, kFew = 1, kShort = 2 };

// A threshold, and the memory of kTargetDensity: PolicyState in policy.py.
struct PolicyState {
    double threshold;
    double trend;
    double deviation;
    Supply supply;
};

// The sample of kTargetDensity (SampledQuantiles in quantile_sample.h).
struct SampleTotals {
    double quantile[4];  // now, shuffled, next, same; as thresholds
    uint64_t elements, agreeing, opposing;
    uint64_t still = 0;  // elements whose sum of residual and update is zero
    double floor = 0;    // the least useful threshold if `now` is below it, otherwise 0
};

struct EncoderState {
    double threshold;  // the policy's, for the next step
    double trend;      // memory of kTargetDensity: PolicyState in policy.py
    double deviation;
    Supply supply;
    uint64_t step;
    uint64_t changed_at;  // for kTargetDensity the step at which the policy began
    uint16_t rounded;     // the threshold, bfloat16
    uint16_t used;        // the threshold of the next message: the rounded one, or that of a shake-up
    uint8_t flags;        // of the next message
    uint8_t clips;        // whether the next step clips
    Nonfinite nonfinite;
    uint64_t held_back;    // elements that reached the threshold, but not the budget of bytes
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

// Return sin(pi x). The device's sin() has a branch for large arguments, whose call spills registers.
GRADWIRE_HD inline double sin_pi(double x) {
#if defined(__CUDA_ARCH__)
    return sinpi(x);
#else
    return std::sin(3.141592653589793 * x);
#endif
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
    const double correlation = std::fmax(sin_pi(agreement - 0.5), 0.0);
    const double repeats = correlation * correlation;
    const double predicted = std::hypot(std::sqrt(1.0 - repeats) * independent, std::sqrt(repeats) * same);
    return density == 0.0 && agreement >= kRepeated ? predicted * kBelowTies : predicted;
}

// As in policy.py, below as well.
constexpr uint64_t kSampledSteps = 10;
constexpr double kDeviationMax = 4.0;
constexpr double kSpanMin = 10.0;
constexpr double kTrendMax = 1.5;
constexpr double kFirstTrend = 0.5;
constexpr double kFewPerTarget = 4.0;
constexpr uint64_t kFewSteps = 8;
constexpr double kMostPerTarget = 2.0;
constexpr uint64_t kLeastMost = 64;
constexpr uint64_t kLimitedNumel = 1 << 14;
constexpr double kLeft = 29.0 / 32.0;

// Return the most changed elements of a message: TargetDensity.most_changed in policy.py.
inline uint64_t most_of_target(double density, uint64_t numel) {
    if (numel < kLimitedNumel) return numel;
    const auto most = static_cast<uint64_t>(kMostPerTarget * density * static_cast<double>(numel));
    return most > kLeastMost ? most : kLeastMost;
}

// Return whether this step is sampled.
GRADWIRE_HD inline bool samples(const Policy& policy, const EncoderState& state) {
    if (policy.rule != Rule::kTargetDensity) return false;
    if (state.trend < 0) return true;
    if (state.flags & kFlagShakeUp) return false;
    const uint64_t age = state.step - state.changed_at;
    if (age < kSampledSteps || std::fabs(state.deviation) >= kDeviationMax) return true;
    return state.supply != Supply::kEnough && age % kFewSteps == 0;
}

// Return the number of the first sampled group: sample_turn in policy.py.
GRADWIRE_HD inline uint64_t sample_turn(const EncoderState& state) {
    const uint64_t turns = (state.step - state.changed_at) / kFewSteps;
    return turns > 0 ? turns - 1 : 0;
}

GRADWIRE_HD inline double bounded(double value, double least, double most) {
    return std::fmin(std::fmax(value, least), most);
}

GRADWIRE_HD inline Supply supply_of(const Policy& policy, const SampleTotals& sample) {
    if (sample.floor > 0 || sample.quantile[0] <= 0) return Supply::kShort;
    const double moving = static_cast<double>(sample.elements - sample.still) / static_cast<double>(sample.elements);
    return moving < kFewPerTarget * policy.density ? Supply::kFew : Supply::kEnough;
}

// Return the next threshold under kTargetDensity: TargetDensity.follow in policy.py.
GRADWIRE_HD inline double follow_target(const Policy& policy, EncoderState& state, double density) {
    const auto age = static_cast<double>(state.step - state.changed_at);
    const double off = std::fmin(density / policy.density - 1.0, kDeviationMax);
    const double deviation =
        age >= kSampledSteps - 2 ? bounded(0.9 * state.deviation + off, -kDeviationMax, kDeviationMax) : 0.0;
    const bool sampled = state.sample.elements > 0;
    // Not all elements that reached the threshold were sent: SampledQuantiles.held_back in policy.py.
    if (sampled && state.held_back > 0) {
        double* const quantile = state.sample.quantile;
        const double left = kLeft * quantile[0];
        quantile[2] = std::fmax(quantile[2], left);
        quantile[3] = std::fmax(quantile[3], left * ((age + 2.0) / (age + 1.0)));
    }
    const Supply supply = sampled ? supply_of(policy, state.sample) : state.supply;
    if (state.trend < 0) {
        if (!sampled || state.sample.quantile[0] <= 0) return state.threshold;
        state.trend = kFirstTrend;
        state.deviation = deviation;
        state.supply = supply;
        return bounded(2.0 * state.threshold, policy.minimum, kLargestThreshold);
    }
    const double deviation_before = state.deviation;
    const Supply supply_before = state.supply;
    state.supply = supply;
    if (supply == Supply::kShort) {
        state.deviation = std::fmax(deviation, 0.0);
        if (!sampled || state.sample.floor <= 0) return state.threshold;
        state.deviation = 0.0;
        return bounded(state.sample.floor, policy.minimum, kLargestThreshold);
    }
    state.deviation = deviation;
    if (sampled && state.sample.quantile[2] <= 0) return state.threshold;
    const double span = std::fmin(age + 1.0, std::fmax(1.0 / policy.density, kSpanMin));
    const double growth = age + 1.0 < 1.0 / policy.density ? state.trend : 0.0;
    const double corrected =
        bounded(state.threshold * (1.0 + (growth + 0.5 * deviation) / span), policy.minimum, kLargestThreshold);
    if (!sampled) return corrected;
    double predicted = bounded(predict_quantile(state.sample, density), policy.minimum, kLargestThreshold);
    if (age >= kSampledSteps) {
        if (supply_before == Supply::kShort) {
            state.deviation = 0.0;
            return predicted;
        }
        if (supply_before == Supply::kFew && std::fabs(deviation_before) < kDeviationMax) return corrected;
        return deviation < 0 ? std::fmin(corrected, predicted) : std::fmax(corrected, predicted);
    }
    if (age == 1)
        predicted = std::fmax(predicted, bounded(state.sample.quantile[3], policy.minimum, kLargestThreshold));
    const double seen = bounded(span * (predicted / state.threshold - 1.0), 0.0, kTrendMax);
    state.trend += (seen - state.trend) / 4.0;
    return predicted;
}

GRADWIRE_HD inline double next_threshold(const Policy& policy, EncoderState& state, double density) {
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
        case Rule::kTargetDensity: return follow_target(policy, state, density);
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

// Learn the first threshold from the sample of the first update.
GRADWIRE_HD inline void learn_threshold(const Policy& policy, EncoderState& state) {
    if (state.trend >= 0 || state.sample.quantile[0] <= 0) return;
    const double first = state.sample.floor > 0 ? state.sample.floor : state.sample.quantile[0];
    state.threshold = bounded(first, policy.minimum, kLargestThreshold);
    prepare_step(policy, state);
}

// Finish a step whose messages have `count` elements in all. `follows` is false for dense messages, which do not feed
// the policy.
GRADWIRE_HD inline void finish_step(const Policy& policy, EncoderState& state, uint64_t numel, uint64_t count,
                                    uint64_t messages, uint64_t message_bytes, bool follows) {
    state.messages += messages;
    state.message_bytes += message_bytes;
    state.sent += count;
    state.nonfinite_total += state.nonfinite.count;
    state.clipped += state.clipped_now;
    state.clipped_sum += state.clipped_sum_now;
    if (follows && !(state.flags & kFlagShakeUp) && numel > 0) {
        const auto reached = static_cast<double>(count + state.held_back);
        const double next = next_threshold(policy, state, reached / static_cast<double>(numel));
        if (next != state.threshold) {
            state.threshold = next;
            if (policy.rule != Rule::kTargetDensity) state.changed_at = state.step + 1;
        }
    }
    ++state.step;
    prepare_step(policy, state);
}

GRADWIRE_HD inline void clear_step(EncoderState& state) {
    state.nonfinite = {0, UINT64_MAX};
    state.held_back = 0;
    state.clipped_now = 0;
    state.clipped_sum_now = 0;
}

}  // namespace gradwire::cuda
