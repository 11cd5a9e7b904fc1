// Single values of the update dtypes, and rounding to bfloat16. The functions are in an anonymous namespace, because
// this header is compiled for several instruction sets.
#pragma once

#include <cstdint>
#include <cstring>

#include "host_device.h"

namespace gradwire {

struct Half {
    uint16_t bits;
};
struct Bfloat16 {
    uint16_t bits;
};

// How elements are sent: from the magnitude `bound` on, as +-`quantum`.
template <class Scalar>
struct Levels {
    Scalar bound;
    Scalar quantum;
};

namespace {

template <class To, class From>
GRADWIRE_HD inline To bit_cast(From from) {
    static_assert(sizeof(To) == sizeof(From), "same size");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

GRADWIRE_HD inline float to_float(float value) { return value; }
GRADWIRE_HD inline float bfloat16_to_float(uint16_t bits) { return bit_cast<float>(uint32_t{bits} << 16); }
GRADWIRE_HD inline float to_float(Bfloat16 value) { return bfloat16_to_float(value.bits); }
GRADWIRE_HD inline float to_float(Half value) {
    const uint32_t sign = uint32_t{value.bits & 0x8000U} << 16;
    const uint32_t magnitude = value.bits & 0x7fffU;
    if (magnitude >= 0x7c00) return bit_cast<float>(sign | 0x7f800000U | (magnitude & 0x3ffU) << 13);
    // The product with 2^112 moves half's exponent bias to float's and normalises subnormals, exactly.
    const float scaled = bit_cast<float>(magnitude << 13) * 5.192296858534828e33F;
    return bit_cast<float>(sign | bit_cast<uint32_t>(scaled));
}

template <class To>
GRADWIRE_HD inline To to_scalar(double value) {
    return static_cast<To>(value);
}
template <class To>
GRADWIRE_HD inline To to_scalar(float value) {
    return static_cast<To>(value);
}
template <class To>
GRADWIRE_HD inline To to_scalar(Half value) {
    return static_cast<To>(to_float(value));
}
template <class To>
GRADWIRE_HD inline To to_scalar(Bfloat16 value) {
    return static_cast<To>(to_float(value));
}

GRADWIRE_HD inline bool is_finite(float value) { return (bit_cast<uint32_t>(value) & 0x7f800000U) != 0x7f800000U; }
GRADWIRE_HD inline bool is_finite(double value) {
    return (bit_cast<uint64_t>(value) & 0x7ff0000000000000U) != 0x7ff0000000000000U;
}
GRADWIRE_HD inline float absolute(float value) { return __builtin_fabsf(value); }
GRADWIRE_HD inline double absolute(double value) { return __builtin_fabs(value); }

// Return the upper bits of a finite magnitude: those of the largest bfloat16 value up to it.
inline constexpr unsigned kMagnitudeBins = 1U << 15;
GRADWIRE_HD inline unsigned magnitude_bin(float value) { return bit_cast<uint32_t>(absolute(value)) >> 16; }
GRADWIRE_HD inline unsigned magnitude_bin(double value) {
    const double magnitude = absolute(value);
    const auto narrow = static_cast<float>(magnitude);
    return (bit_cast<uint32_t>(narrow) - (static_cast<double>(narrow) > magnitude)) >> 16;
}

// Round to the nearest bfloat16, ties to even; NaN stays NaN.
GRADWIRE_HD inline uint16_t float_to_bfloat16(float value) {
    const auto bits = bit_cast<uint32_t>(value);
    if ((bits & 0x7fffffffU) > 0x7f800000U) return static_cast<uint16_t>((bits >> 16) | 0x40U);
    return static_cast<uint16_t>((bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16);
}

// Return a value as the type of a first argument would hold it: the nearest one, ties to even.
GRADWIRE_HD inline float rounded_to(Bfloat16, float value) { return bfloat16_to_float(float_to_bfloat16(value)); }
GRADWIRE_HD inline float rounded_to(Half, float value) {
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

// As float_to_bfloat16, but round no finite value to infinity: a dense message is as finite as its source.
template <class Value>
GRADWIRE_HD inline uint16_t to_finite_bfloat16(Value value) {
    constexpr float kMost = 3.3895313892515355e38F;
    const bool finite = is_finite(value);
    if (finite && value > Value{kMost}) value = Value{kMost};
    if (finite && value < Value{-kMost}) value = Value{-kMost};
    return float_to_bfloat16(static_cast<float>(value));
}

// Return the levels of a threshold (bfloat16 bits): elements have to reach its share `rounding_point`.
template <class Scalar>
GRADWIRE_HD inline Levels<Scalar> levels_of(uint16_t threshold, double rounding_point) {
    const auto quantum = static_cast<Scalar>(bfloat16_to_float(threshold));
    return {quantum * static_cast<Scalar>(rounding_point), quantum};
}

// Return the threshold (bfloat16 bits) of which the value of a magnitude_bin is the share `rounding_point`.
GRADWIRE_HD inline uint16_t threshold_from(unsigned bin, double rounding_point) {
    const auto bound = static_cast<double>(bfloat16_to_float(static_cast<uint16_t>(bin)));
    const uint16_t threshold = to_finite_bfloat16(bound / rounding_point);
    return threshold > 0 ? threshold : uint16_t{1};  // bin 0 is below every threshold
}

}  // namespace
}  // namespace gradwire
