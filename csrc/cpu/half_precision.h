// Parameters in half precision beside their float32 copies. Written once over the vectors of an instruction set.
//
// `Type` is that of the parameters: Scalar, load (widens kLanes values, exactly) and rounded (the nearest values, ties
// to even, in float32). What becomes of NaN does not matter: added to the copy it came from it is NaN again.
#pragma once

#include "../common/scalars.h"
#include "kernels.h"

namespace gradwire {
namespace {

inline float rounded_to(Bfloat16, float value) { return bfloat16_to_float(float_to_bfloat16(value)); }
inline float rounded_to(Half, float value) {
    const uint32_t sign = bit_cast<uint32_t>(value) & 0x80000000U;
    uint32_t magnitude = bit_cast<uint32_t>(value) & 0x7fffffffU;
    if (magnitude > 0x7f800000U) return value;
    if (magnitude < 0x38800000U) {  // below 2^-14: the last bit of the sum is that of half's subnormals
        const float subnormal = bit_cast<float>(magnitude) + 0.5F - 0.5F;
        return bit_cast<float>(sign | bit_cast<uint32_t>(subnormal));
    }
    magnitude = (magnitude + 0xfffU + (magnitude >> 13 & 1U)) & ~0x1fffU;
    return bit_cast<float>(sign | (magnitude < 0x47800000U ? magnitude : 0x7f800000U));  // 2^16 and more is infinite
}

// Memory traffic: the copy is read and written, the parameters are read (10 bytes per element).
template <class Lanes, class Type>
void add_moved(float* copy, const void* params, uint64_t numel) {
    const auto* now = static_cast<const typename Type::Scalar*>(params);
    uint64_t i = 0;
    for (; i + Lanes::kLanes <= numel; i += Lanes::kLanes) {
        const auto before = Lanes::load(copy + i);
        Lanes::store(copy + i, Lanes::add(before, Lanes::subtract(Type::load(now + i), Type::rounded(before))));
    }
    for (; i < numel; ++i) copy[i] += to_float(now[i]) - rounded_to(now[i], copy[i]);
}

}  // namespace
}  // namespace gradwire
