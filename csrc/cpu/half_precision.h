// Parameters in half precision beside their float32 copies. `add_moved` is written once over the vectors of an
// instruction set.
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

// Memory traffic: the copy is read, the parameters are written (6 bytes per element). Compilers make vectors of it.
void round_bfloat16(const float* copy, void* params, uint64_t numel) {
    constexpr uint64_t kBlock = 64;
    auto* rounded = static_cast<uint16_t*>(params);
    for (; numel >= kBlock; numel -= kBlock, copy += kBlock, rounded += kBlock) {
        for (uint64_t i = 0; i < kBlock; i += 16) prefetch_ahead(copy + i);
        for (uint64_t i = 0; i < kBlock; ++i) rounded[i] = float_to_bfloat16(copy[i]);
    }
    for (uint64_t i = 0; i < numel; ++i) rounded[i] = float_to_bfloat16(copy[i]);
}

}  // namespace
}  // namespace gradwire
