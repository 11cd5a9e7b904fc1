// The arrays of an update or a target as the argument of a kernel: elements of one flat range, in order.
#pragma once

#include <cstdint>

#include "../common/arrays.h"
#include "../common/scalars.h"
#include "masks.h"

namespace gradwire::cuda {

inline constexpr unsigned kMostArrays = 160;  // of one launch; 4 KiB of arguments is what every driver takes

struct ArrayRef {
    void* data;    // the array's first element
    uint64_t end;  // flat index of the element after its last
};

struct ArrayTable {
    uint64_t begin = 0;  // index of the first array's first element
    uint32_t count = 0;
    ArrayRef arrays[kMostArrays];
    uint8_t dtypes[kMostArrays];

    GRADWIRE_HD uint64_t first_of(unsigned i) const { return i == 0 ? begin : arrays[i - 1].end; }
    // Return the array that holds the element, which must exist.
    GRADWIRE_HD unsigned find(uint64_t element) const {
        unsigned low = 0;
        for (unsigned high = count; high - low > 1;) {
            const unsigned middle = (low + high) / 2;
            if (first_of(middle) <= element)
                low = middle;
            else
                high = middle;
        }
        while (low + 1 < count && arrays[low].end <= element) ++low;  // past empty arrays
        return low;
    }
};
static_assert(sizeof(ArrayTable) <= 4000, "fits beside a kernel's other arguments");

template <class To>
GRADWIRE_HD To value_of(const void* data, uint64_t index, Dtype dtype) {
    switch (dtype) {
        case Dtype::kFloat32: return to_scalar<To>(static_cast<const float*>(data)[index]);
        case Dtype::kFloat64: return to_scalar<To>(static_cast<const double*>(data)[index]);
        case Dtype::kFloat16: return to_scalar<To>(static_cast<const Half*>(data)[index]);
        case Dtype::kBfloat16: return to_scalar<To>(static_cast<const Bfloat16*>(data)[index]);
        case Dtype::kNone: break;
    }
    return To{0};
}

}  // namespace gradwire::cuda

namespace gradwire {

template <>
inline constexpr Dtype kDtypeOf<Half> = Dtype::kFloat16;
template <>
inline constexpr Dtype kDtypeOf<Bfloat16> = Dtype::kBfloat16;

}  // namespace gradwire

namespace gradwire::cuda {

// Four neighbouring elements, loaded and stored together: 16 bytes of float32, 8 of the half types, twice 16 of
// float64.
template <class T>
struct alignas(sizeof(T) * 4 > 16 ? 16 : sizeof(T) * 4) Four {
    T value[4];
};
template <class T>
GRADWIRE_HD Four<T> load_four(const T* from) {
    Four<T> four;
#if defined(__CUDA_ARCH__)
    four = *reinterpret_cast<const Four<T>*>(from);
#else
    std::memcpy(&four, from, sizeof four);
#endif
    return four;
}
template <class T>
GRADWIRE_HD void store_four(T* to, const Four<T>& four) {
#if defined(__CUDA_ARCH__)
    *reinterpret_cast<Four<T>*>(to) = four;
#else
    std::memcpy(to, &four, sizeof four);
#endif
}

}  // namespace gradwire::cuda
