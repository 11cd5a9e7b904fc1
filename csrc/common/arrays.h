// The arrays of an update or a target: memory that the caller owns.
#pragma once

#include <cstdint>
#include <vector>

#include "host_device.h"

namespace gradwire {

// The dtype of an array; kNone stands for an update that the caller has already added to the residual.
enum class Dtype : uint8_t { kNone = 0, kFloat32 = 1, kFloat64 = 2, kFloat16 = 3, kBfloat16 = 4 };
inline constexpr unsigned kDtypes = 5;

GRADWIRE_HD static inline constexpr uint64_t bytes_per_element(Dtype dtype) {
    return dtype == Dtype::kFloat64 ? 8 : dtype == Dtype::kFloat32 ? 4 : 2;
}

// Call f with a zero of the type of `dtype`, which is kFloat32 or kFloat64.
template <class F>
auto with_value_of(Dtype dtype, F f) {
    return dtype == Dtype::kFloat64 ? f(double{}) : f(float{});
}

template <class Value>
inline constexpr Dtype kDtypeOf = Dtype::kNone;
template <>
inline constexpr Dtype kDtypeOf<float> = Dtype::kFloat32;
template <>
inline constexpr Dtype kDtypeOf<double> = Dtype::kFloat64;

// One array of an update: `numel` contiguous elements.
struct ConstArray {
    const void* data;
    uint64_t numel;
    Dtype dtype;
};

// One array of a target; `dtype` is kFloat32 or kFloat64.
struct Array {
    void* data;
    uint64_t numel;
    Dtype dtype;
};

template <class AnyArray>
uint64_t total_numel(const std::vector<AnyArray>& arrays) {
    uint64_t numel = 0;
    for (const AnyArray& array : arrays) numel += array.numel;
    return numel;
}

// An array of float16 or bfloat16 parameters, and the copy of as many elements.
struct HalfArray {
    void* params;
    float* copy;
    uint64_t numel;
    Dtype dtype;
};

}  // namespace gradwire
