// Dense messages on a device: the values of the residual, raw.
#pragma once

#include "../common/format.h"
#include "../common/scalars.h"

namespace gradwire::cuda {

// Write value `index` of the message in the message's type and subtract it from the residual, which keeps the rounding
// error of bfloat16.
template <class Residual>
GRADWIRE_HD void send_value(Residual& residual, DenseType dtype, uint8_t* payload, uint64_t index) {
    const Residual value = residual;
    if (dtype == DenseType::kBfloat16) {
        const uint16_t bits = to_finite_bfloat16(value);
        reinterpret_cast<uint16_t*>(payload)[index] = bits;
        residual = value + static_cast<Residual>(-1.0 * to_scalar<double>(Bfloat16{bits}));
    } else {
        reinterpret_cast<Residual*>(payload)[index] = value;
        residual = value + static_cast<Residual>(-1.0 * static_cast<double>(value));
    }
}

}  // namespace gradwire::cuda
