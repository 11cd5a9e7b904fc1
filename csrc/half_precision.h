// Parameters in half precision, of which the codec has copies in float32. The copies keep the bits that the parameters
// have rounded off.
#pragma once

#include <vector>

#include "common/arrays.h"

namespace gradwire {

// copy += params - (copy, rounded to the parameters' type): what has changed since they were set to the rounded copy.
// Bits, but for those of NaN, depend neither on the number of threads nor on the instruction set.
void add_moved(const std::vector<HalfArray>& arrays, unsigned threads);

// params = copy, rounded: parameters of bfloat16.
void round_copies(const std::vector<HalfArray>& arrays, unsigned threads);

}  // namespace gradwire
