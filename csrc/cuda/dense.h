// Dense messages on a device: the residual's values, raw.
#pragma once

#include "lay_out.h"
#include "sources.h"

namespace gradwire::cuda {

// Nearest-even, but a finite value never to infinity, as code.cpp has it.
template <class Value>
GRADWIRE_HD uint16_t bfloat16_of(Value value) {
    constexpr float kMost = 3.3895313892515355e38F;
    const bool finite = is_finite(value);
    if (finite && value > Value{kMost}) value = Value{kMost};
    if (finite && value < Value{-kMost}) value = Value{-kMost};
    const auto bits = bit_cast<uint32_t>(static_cast<float>(value));
    if ((bits & 0x7fffffffU) > 0x7f800000U) return static_cast<uint16_t>((bits >> 16) | 0x40U);
    return static_cast<uint16_t>((bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16);
}

// Writes one value as the message's type says and takes it out of the residual; what bfloat16 rounds away stays.
template <class Residual>
GRADWIRE_HD void send_value(Residual* residual, uint64_t index, DenseType dtype, uint8_t* payload) {
    const Residual value = residual[index];
    if (dtype == DenseType::kBfloat16) {
        const uint16_t bits = bfloat16_of(value);
        reinterpret_cast<uint16_t*>(payload)[index] = bits;
        residual[index] = value + static_cast<Residual>(-1.0 * to_scalar<double>(Bfloat16{bits}));
    } else {
        reinterpret_cast<Residual*>(payload)[index] = value;
        residual[index] = value + static_cast<Residual>(-1.0 * static_cast<double>(value));
    }
}

}  // namespace gradwire::cuda
