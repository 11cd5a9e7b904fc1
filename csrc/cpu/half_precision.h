// Parameters in half precision beside their float32 copies. Written once over the vectors of an instruction set.
//
// `Type` is that of the parameters: Scalar, load (widens kLanes values, exactly) and rounded (the nearest values, ties
// to even, in float32). What becomes of NaN does not matter: added to the copy it came from it is NaN again.
#pragma once

#include "../common/scalars.h"
#include "kernels.h"

namespace gradwire {
namespace {

// Memory traffic: the copy is read and written, the parameters are read (10 bytes per element).
template <class Lanes, class Type>
void add_moved(float* copy, const void* params, uint64_t numel) {
    const auto* now = static_cast<const typename Type::Scalar*>(params);
    uint64_t i = 0;
    for (; i + Lanes::kLanes <= numel; i += Lanes::kLanes) {
        prefetch_ahead(copy + i);
        prefetch_ahead(now + i);
        const auto before = Lanes::load(copy + i);
        Lanes::store(copy + i, Lanes::add(before, Lanes::subtract(Type::load(now + i), Type::rounded(before))));
    }
    for (; i < numel; ++i) copy[i] += to_float(now[i]) - rounded_to(now[i], copy[i]);
}

}  // namespace
}  // namespace gradwire
