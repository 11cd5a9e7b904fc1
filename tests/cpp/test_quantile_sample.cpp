// The quantile sample of TargetDensity: the same numbers on every table, and correct quantiles.
#include <algorithm>
#include <functional>
#include <limits>

#include "support.h"

using namespace gradwire;
using namespace support;

namespace {

SampledQuantiles measure(Dtype residual, const UpdateArray* update, uint64_t numel, double density, uint64_t seed) {
    Random random(seed);
    Encoder encoder(numel, residual, 1);
    for (uint64_t i = 0; i < numel; ++i) put_value(encoder.residual(), i, residual, tricky_value(random, 0.5, false));
    if (!update) return encoder.sample(nullptr, 0x3f00, 1.0, density);
    // In two arrays, so that a group lies across them.
    const uint64_t first = numel / 3;
    const uint8_t* data = static_cast<const uint8_t*>(update->data());
    const std::vector<ConstArray> views{
        {data, first, update->dtype()},
        {data + first * bytes_per_element(update->dtype()), numel - first, update->dtype()}};
    return encoder.sample(&views, 0x3f00, 1.0, density);
}

bool same(double a, double b) { return std::memcmp(&a, &b, sizeof a) == 0; }
bool same(const SampledQuantiles& a, const SampledQuantiles& b) {
    return same(a.now, b.now) && same(a.shuffled, b.shuffled) && same(a.next, b.next) && same(a.same, b.same) &&
           same(a.agreement, b.agreement);
}

}  // namespace

CASE(every_table_samples_the_same_quantiles) {
    for (const Dtype residual : {Dtype::kFloat32, Dtype::kFloat64})
        for (const Dtype dtype : {Dtype::kNone, Dtype::kFloat32, Dtype::kFloat64, Dtype::kFloat16, Dtype::kBfloat16})
            for (const uint64_t numel : Numbers{0, 1, 7, 8, 9, 15, 16, 17, 24, 25, 100, 4099, 300007})
                for (const double density : {1e-4, 0.03, 0.5, 1.0}) {
                    if (residual == Dtype::kFloat32 && dtype == Dtype::kFloat64) continue;
                    const check::Note notes[] = {{"numel", numel}, {"update dtype", unsigned(dtype)}};
                    UpdateArray update(numel, dtype == Dtype::kNone ? residual : dtype, 1);
                    Random random(numel);
                    for (uint64_t i = 0; i < numel; ++i) update.set(i, tricky_value(random, 0.5, numel % 2 == 1));
                    const UpdateArray* given = dtype == Dtype::kNone ? nullptr : &update;
                    select_isa("scalar");
                    const SampledQuantiles expected = measure(residual, given, numel, density, numel + 1);
                    for_every_table(
                        [&] { CHECK(same(measure(residual, given, numel, density, numel + 1), expected)); });
                }
}

CASE(the_quantile_is_that_of_the_magnitudes_about_to_be_compared) {
    const uint64_t numel = 4096;  // of so few all are in the sample
    Random random(3);
    UpdateArray update(numel, Dtype::kFloat32, 0);
    std::vector<double> magnitudes;
    for (uint64_t i = 0; i < numel; ++i) {
        update.set(i, std::exp(8 * random.uniform()) * (random.chance(0.5) ? -1 : 1));
        magnitudes.push_back(std::fabs(update[i]));
    }
    std::sort(magnitudes.begin(), magnitudes.end(), std::greater<double>());
    const std::vector<ConstArray> views{update.view()};
    for_every_table([&] {
        for (const double density : {1e-3, 0.01, 0.1, 0.7}) {
            Encoder encoder(numel, Dtype::kFloat32, 1);
            const SampledQuantiles quantiles = encoder.sample(&views, 0x7f7f, 1.0, density);
            const double exact = magnitudes[static_cast<size_t>(density * static_cast<double>(numel)) - 1];
            // Bins are 1/64 of an octave, 1.6 % at most.
            CHECK(std::fabs(quantiles.now / exact - 1) < 0.02);
        }
    });
}
