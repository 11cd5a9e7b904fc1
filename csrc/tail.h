// The sample of the residual that TargetDensity steers by (docs/algorithm.md derives it; reference.py says it plainly).
#pragma once

#include <vector>

#include "codec.h"

namespace gradwire {

// From one sampled group of sixteen elements to the next, in elements: about 640 sampled elements are to exceed the
// density's quantile. Odd in groups, so that it does not fall in step with the rows of a matrix.
uint64_t tail_stride(uint64_t numel, double density);

// What this step is about to compare and what the next one would, before either happens: reads a sample of at most
// 2^18 elements of `residual` and `update` (none where the update has already been added), writes nothing.
template <class Residual>
Tail measure_tail(const Residual* residual, uint64_t numel, const std::vector<ConstArray>* update, Residual threshold,
                  double density);

}  // namespace gradwire
