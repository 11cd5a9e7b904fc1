// Dense messages on a device: the values of the residual, raw.
#pragma once

#include "../common/format.h"
#include "../common/scalars.h"

namespace gradwire::cuda {

// Write one value in the type of the message and subtract it from the residual, which keeps the rounding error of
// bfloat16.
template <class Residual>
GRADWIRE_HD void send_value(Residual* residual, uint64_t index, DenseType dtype, uint8_t* payload) {
    const Residual value = residual[index];
    if (dtype == DenseType::kBfloat16) {
        const uint16_t bits = to_finite_bfloat16(value);
        reinterpret_cast<uint16_t*>(payload)[index] = bits;
        residual[index] = value + static_cast<Residual>(-1.0 * to_scalar<double>(Bfloat16{bits}));
    } else {
        reinterpret_cast<Residual*>(payload)[index] = value;
        residual[index] = value + static_cast<Residual>(-1.0 * static_cast<double>(value));
    }
}

}  // namespace gradwire::cuda
