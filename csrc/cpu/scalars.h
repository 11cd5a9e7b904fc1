// Single values of the update dtypes. Anonymous namespace for the reason given in bits.h.
#pragma once

#include <cstdint>
#include <cstring>

#include "../message.h"

namespace gradwire {
namespace {

struct Half {
    uint16_t bits;
};
struct Bfloat16 {
    uint16_t bits;
};

template <class To, class From>
GRADWIRE_HD inline To bit_cast(From from) {
    static_assert(sizeof(To) == sizeof(From), "same size");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

GRADWIRE_HD inline float to_float(float value) { return value; }
GRADWIRE_HD inline float to_float(Bfloat16 value) { return bit_cast<float>(uint32_t{value.bits} << 16); }
GRADWIRE_HD inline float to_float(Half value) {
    const uint32_t sign = uint32_t{value.bits & 0x8000U} << 16;
    const uint32_t magnitude = value.bits & 0x7fffU;
    if (magnitude >= 0x7c00) return bit_cast<float>(sign | 0x7f800000U | (magnitude & 0x3ffU) << 13);
    // 2^112 moves half's exponent bias to float's; it also normalises subnormals, exactly.
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

}  // namespace
}  // namespace gradwire
