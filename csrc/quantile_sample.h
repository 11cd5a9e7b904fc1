// The quantile sample of TargetDensity; docs/algorithm.md derives it.
#pragma once

#include <vector>

#include "common/arrays.h"
#include "common/scalars.h"

namespace gradwire {

// The quantiles that TargetDensity predicts from; `SampledQuantiles` in python/gradwire/policy.py describes each.
struct SampledQuantiles {
    double now = 0;
    double shuffled = 0;
    double next = 0;
    double same = 0;
    double agreement = 0.5;
    double moving = 0;
    double floor = 0;
};

// Sample the magnitudes that this step is about to compare with the bound and those that the next step would
// compare. Reads at most 2^18 elements of `residual` and `update` (null if already added) and writes nothing. The first
// group is the one with the number `turn`, modulo the distance between two groups. If `is_gathered`, `residual` has the
// sampled groups only, one after another.
template <class Residual>
SampledQuantiles sample_quantiles(const Residual* residual, bool is_gathered, uint64_t numel,
                                  const std::vector<ConstArray>* update, Levels<Residual> levels, double density,
                                  uint64_t turn);

}  // namespace gradwire
