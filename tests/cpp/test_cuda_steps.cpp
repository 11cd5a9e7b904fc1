// The steps of a device, on the CPU: sampled quantiles, the next threshold, and dense messages.
#include "cuda/dense.h"
#include "cuda/quantile_sample.h"
#include "emulated_encoder.h"

using namespace gradwire;
using namespace support;

namespace {

constexpr double kReach = 0.5625;

cuda::SampleTotals measure_emulated(const Encoder& encoder, const void* residual, const std::vector<ConstArray>* update,
                                    double density, uint64_t turn, bool backwards) {
    const uint64_t numel = encoder.numel();
    std::vector<uint32_t> bins(kSampleQuantiles * kBins);
    cuda::SampleTotals sample{};
    std::vector<cuda::ArrayRange> ranges;
    if (update) ranges = cuda::cut_ranges(*update, numel, cuda::kGroupElements);
    const uint64_t stride = sample_stride(numel, density);
    for (uint64_t first = first_sampled(stride, turn); first < numel; first += stride) {
        static const cuda::ArrayTable kNone{};
        const cuda::ArrayTable* arrays = &kNone;
        for (const cuda::ArrayRange& range : ranges)
            if (range.begin <= first && first < range.end) arrays = &range.arrays;
        if (encoder.dtype() == Dtype::kFloat64)
            sample_group(static_cast<const double*>(residual), *arrays, first, numel, levels_of<double>(0x3f00, kReach),
                         bins.data(), &sample);
        else
            sample_group(static_cast<const float*>(residual), *arrays, first, numel, levels_of<float>(0x3f00, kReach),
                         bins.data(), &sample);
    }
    Block block(backwards);
    for (unsigned q = 0; q < kSampleQuantiles; ++q)
        cuda::find_quantile(block, bins.data() + q * kBins, density * static_cast<double>(sample.elements),
                            &sample.quantile[q], q == 0 ? &sample.floor : nullptr);
    CHECK(bins == std::vector<uint32_t>(bins.size()));  // cleared for the next step
    return sample;
}

bool same(double a, double b) { return std::memcmp(&a, &b, sizeof a) == 0; }

}  // namespace

CASE(the_sampled_quantiles_are_those_of_the_cpu) {
    for (const Dtype residual : {Dtype::kFloat32, Dtype::kFloat64})
        for (const Dtype dtype : {Dtype::kNone, Dtype::kFloat32, Dtype::kBfloat16})
            for (const uint64_t numel : Numbers{1, 8, 9, 16, 17, 24, 100, 4099, 300007, 1 << 20})
                for (const double density : {1e-4, 0.03, 0.5, 1.0}) {
                    const check::Note notes[] = {{"numel", numel}, {"update dtype", unsigned(dtype)}};
                    Random random(numel);
                    const uint64_t turn = numel % 5;
                    Encoder encoder(numel, residual, 1);
                    for (uint64_t i = 0; i < numel; ++i)
                        put_value(encoder.residual(), i, residual, tricky_value(random, 0.5, false));
                    UpdateArray update(numel, dtype == Dtype::kNone ? Dtype::kFloat32 : dtype, 1);
                    for (uint64_t i = 0; i < numel; ++i) update.set(i, tricky_value(random, 0.5, numel % 2 == 1));
                    const std::vector<ConstArray> views{update.view()};
                    const std::vector<ConstArray>* given = dtype == Dtype::kNone ? nullptr : &views;
                    const cuda::SampleTotals sample =
                        measure_emulated(encoder, encoder.residual(), given, density, turn, numel % 2 == 0);
                    const SampledQuantiles expected = encoder.sample(given, 0x3f00, kReach, density, turn);
                    CHECK(same(sample.quantile[0], expected.now));
                    CHECK(same(sample.quantile[1], expected.shuffled));
                    CHECK(same(sample.quantile[2], expected.next));
                    CHECK(same(sample.quantile[3], expected.same));
                    const uint64_t either = sample.agreeing + sample.opposing;
                    const double agreement =
                        either > 0 ? static_cast<double>(sample.agreeing) / static_cast<double>(either) : 0.5;
                    CHECK(same(agreement, expected.agreement));
                    CHECK(same(sample.floor, expected.floor));
                    const auto elements = static_cast<double>(sample.elements);
                    const auto moving = static_cast<double>(sample.elements - sample.still);
                    if (elements > 0) CHECK(same(moving / elements, expected.moving));
                }
}

CASE(the_floor_of_few_elements_is_that_of_the_cpu) {
    for (const uint64_t every : Numbers{3, 40, 1000, 100000})
        for (const double octaves : {0.0, 3.0, 40.0}) {
            const check::Note notes[] = {{"every", every}};
            constexpr uint64_t kNumel = 300007;
            Random random(every);
            Encoder encoder(kNumel, Dtype::kFloat32, 1);
            for (uint64_t i = 0; i < kNumel; i += every) {
                const double size = std::exp2(octaves * static_cast<double>(random.below(1000)) / 1000.0);
                put_value(encoder.residual(), i, Dtype::kFloat32, size);
            }
            const cuda::SampleTotals sample =
                measure_emulated(encoder, encoder.residual(), nullptr, 0.03, 1, every % 2 == 0);
            const SampledQuantiles expected = encoder.sample(nullptr, 0x3f00, kReach, 0.03, 1);
            CHECK(same(sample.quantile[0], expected.now));
            CHECK(same(sample.floor, expected.floor));
            if (expected.now > 0 && octaves < 10) CHECK_EQUAL(expected.floor > 0, every > 3);
        }
}

CASE(a_threshold_is_rounded_to_the_nearest_bfloat16_once) {
    for (uint32_t bits = 1; bits < 0x7f7f; ++bits) {
        const double here = static_cast<double>(bfloat16_to_float(static_cast<uint16_t>(bits)));
        const double above = static_cast<double>(bfloat16_to_float(static_cast<uint16_t>(bits + 1)));
        const double middle = here + (above - here) / 2;
        const uint32_t even = bits % 2 == 0 ? bits : bits + 1;
        CHECK_EQUAL(cuda::round_threshold(here), bits);
        CHECK_EQUAL(cuda::round_threshold(middle), even);
        // Through float32 these two would be rounded to the middle first.
        CHECK_EQUAL(cuda::round_threshold(std::nextafter(middle, 0.0)), bits);
        CHECK_EQUAL(cuda::round_threshold(std::nextafter(middle, 1e300)), bits + 1);
    }
}

CASE(thresholds_follow_their_rules) {
    cuda::Policy policy;
    cuda::EncoderState state{};
    state.threshold = 1e-3;
    policy.rule = cuda::Rule::kAdaptive;
    policy.minimum = 4e-4;
    policy.density_min = 0.25;
    policy.density_max = 0.5;
    CHECK_EQUAL(next_threshold(policy, state, 0.2), 5e-4);
    CHECK_EQUAL(next_threshold(policy, state, 0.25), 1e-3);
    CHECK_EQUAL(next_threshold(policy, state, 0.5), 1e-3);
    CHECK_EQUAL(next_threshold(policy, state, 0.6), 2e-3);
    policy.minimum = 8e-4;
    CHECK_EQUAL(next_threshold(policy, state, 0.2), 8e-4);

    policy = {};
    policy.rule = cuda::Rule::kStep;
    policy.minimum = 0.25;
    policy.step = 0.125;
    policy.trigger = 0.1;
    policy.delay = 3;
    state.threshold = 0.5;
    cuda::prepare_step(policy, state);
    const double expected[] = {0.5, 0.5, 0.375, 0.375, 0.375, 0.25, 0.25, 0.25, 0.25};
    for (const double threshold : expected) {
        finish_step(policy, state, 100, 0, 1, 48, true);
        CHECK_EQUAL(state.threshold, threshold);
    }
    CHECK_EQUAL(state.step, 9U);
    CHECK_EQUAL(state.messages, 9U);
    CHECK_EQUAL(state.message_bytes, 9U * 48);

    policy = {};
    policy.rule = cuda::Rule::kTargetDensity;
    policy.minimum = 1e-8;
    policy.density = 0.5;
    state.sample = {{0.5, 0.25, 0.25, 1.0}, 1000, 1, 1};  // signs agree half of the time: independent updates
    CHECK_EQUAL(next_threshold(policy, state, 0.9), 0.5);
    state.sample = {{0.5, 0.25, 0.25, 1.0}, 1000, 5, 0};  // signs always agree: the update repeats
    CHECK_EQUAL(next_threshold(policy, state, 0.9), 1.0);
    CHECK_EQUAL(next_threshold(policy, state, 0.0), 0.96875);  // nothing was sent: all magnitudes are equal
    state.sample.agreeing = 9, state.sample.opposing = 1;
    CHECK(next_threshold(policy, state, 0.0) == next_threshold(policy, state, 0.9));
    state.sample.quantile[2] = 0;
    CHECK_EQUAL(next_threshold(policy, state, 0.9), state.threshold);
}

CASE(the_first_threshold_is_learned_and_samples_end_when_the_density_is_right) {
    cuda::Policy policy;
    policy.rule = cuda::Rule::kTargetDensity;
    policy.minimum = 1e-8;
    policy.density = 0.125;
    cuda::EncoderState state{};
    state.threshold = 1;
    state.trend = -1;
    cuda::prepare_step(policy, state);
    CHECK(samples(policy, state));
    state.sample = {{0, 0, 0, 0}, 1000, 0, 0};  // an update of zeros
    learn_threshold(policy, state);
    finish_step(policy, state, 1000, 0, 1, 48, true);
    CHECK_EQUAL(state.threshold, 1.0);
    state.sample = {{0.25, 0.25, 0.25, 0.25}, 1000, 0, 0};
    learn_threshold(policy, state);
    CHECK_EQUAL(state.used, cuda::round_threshold(0.25));
    finish_step(policy, state, 1000, 125, 1, 48, true);
    CHECK_EQUAL(state.threshold, 0.5);
    CHECK_EQUAL(state.trend, 0.5);
    for (; state.step < 10; finish_step(policy, state, 1000, 125, 1, 48, true)) CHECK(samples(policy, state));
    CHECK(!samples(policy, state));
    for (int i = 0; i < 4; ++i) finish_step(policy, state, 1000, 0, 1, 48, true);
    CHECK(!samples(policy, state));
    finish_step(policy, state, 1000, 0, 1, 48, true);
    CHECK(samples(policy, state));
}

CASE(shake_ups_and_clips_follow_their_schedules_and_do_not_feed_the_policy) {
    cuda::Policy policy;
    policy.rule = cuda::Rule::kAdaptive;
    policy.density_min = 0.5;
    policy.shakeup_every = 3;
    policy.shakeup_divisor = 2;
    policy.clip_every = 2;
    cuda::EncoderState state{};
    state.threshold = 1;
    cuda::prepare_step(policy, state);
    for (uint64_t step = 0; step < 12; ++step) {
        const check::Note note("step", step);
        const double before = state.threshold;
        CHECK_EQUAL(state.flags != 0, step % 3 == 2);
        CHECK_EQUAL(state.clips != 0, step % 2 == 1);
        CHECK_EQUAL(state.used, cuda::round_threshold(step % 3 == 2 ? before / 2 : before));
        CHECK_EQUAL(state.rounded, cuda::round_threshold(before));
        finish_step(policy, state, 100, 0, 1, 48, true);
        CHECK_EQUAL(state.threshold, step % 3 == 2 ? before : before / 2);
    }
    const double before = state.threshold;
    finish_step(policy, state, 100, 100, 1, 448, false);  // a dense message
    CHECK_EQUAL(state.threshold, before);
}

CASE(dense_messages_leave_the_residual_of_the_cpu) {
    const auto check_type = [](auto zero, DenseType type) {
        using Residual = decltype(zero);
        const uint64_t numel = 3000;
        const Dtype dtype = sizeof(Residual) == 8 ? Dtype::kFloat64 : Dtype::kFloat32;
        Encoder encoder(numel, dtype, 1);
        Random random(6);
        std::vector<Residual> residual(numel);
        for (Residual& value : residual) {
            value = static_cast<Residual>(tricky_value(random, 0.5, false));
            if (!std::isfinite(value)) value = 1;
        }
        residual[0] = static_cast<Residual>(3.3961775292304957e38);  // would round to infinity
        std::memcpy(encoder.residual(), residual.data(), numel * sizeof(Residual));
        const Encoded encoded = encoder.encode_dense(nullptr, type, {}, undivided(encoder.numel()));
        Bytes payload(numel * bytes_per_value(type));
        for (uint64_t i = 0; i < numel; ++i) cuda::send_value(residual[i], type, payload.data(), i);
        CHECK(std::memcmp(payload.data(), encoded.messages[0].bytes.get() + kHeaderBytes, payload.size()) == 0);
        CHECK(std::memcmp(residual.data(), encoder.residual(), numel * sizeof(Residual)) == 0);
        Header header = encoded.messages[0].header;
        header.crc = 0;
        Bytes head(kHeaderBytes);
        put_header(head.data(), header);
        for (unsigned i = 0; i < 4; ++i) head[kCrcAt + i] = encoded.messages[0].bytes[kCrcAt + i];
        CHECK(std::memcmp(head.data(), encoded.messages[0].bytes.get(), kHeaderBytes) == 0);
    };
    check_type(0.0F, DenseType::kFloat32);
    check_type(0.0F, DenseType::kBfloat16);
    check_type(0.0, DenseType::kFloat64);
    check_type(0.0, DenseType::kBfloat16);
}
