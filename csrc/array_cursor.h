// A position in a sequence of arrays. Values are read in place or gathered into another type.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "common/arrays.h"
#include "common/scalars.h"

namespace gradwire {
namespace {

template <class To, class From>
void convert_from(const void* from, uint64_t first, uint64_t count, To* to) {
    const From* values = static_cast<const From*>(from) + first;
    for (uint64_t i = 0; i < count; ++i) to[i] = to_scalar<To>(values[i]);
}

template <class To>
void convert(const ConstArray& from, uint64_t first, uint64_t count, To* to) {
    switch (from.dtype) {
        case Dtype::kFloat32: return convert_from<To, float>(from.data, first, count, to);
        case Dtype::kFloat64: return convert_from<To, double>(from.data, first, count, to);
        case Dtype::kFloat16: return convert_from<To, Half>(from.data, first, count, to);
        case Dtype::kBfloat16: return convert_from<To, Bfloat16>(from.data, first, count, to);
        case Dtype::kNone: break;
    }
}

class ArrayCursor {
  public:
    // `arrays` may be null, for a position that is never read.
    ArrayCursor(const std::vector<ConstArray>* arrays, uint64_t element)
        : arrays_(arrays ? arrays->data() : nullptr), count_(arrays ? arrays->size() : 0), offset_(element) {
        skip_empty();
    }
    uint64_t left() const { return arrays_[index_].numel - offset_; }
    Dtype dtype() const { return arrays_[index_].dtype; }
    const void* data() const {
        return static_cast<const uint8_t*>(arrays_[index_].data) + offset_ * bytes_per_element(dtype());
    }
    void advance(uint64_t elements) {
        offset_ += elements;
        skip_empty();
    }
    // Return the next `count` float or double elements in place; null if they have another type or are in several
    // arrays.
    template <class To>
    const To* in_place(uint64_t count) const {
        const bool fits = index_ < count_ && dtype() == kDtypeOf<To> && left() >= count;
        return fits ? static_cast<const To*>(data()) : nullptr;
    }
    // Copy the next `count` elements, from one array or several.
    template <class To>
    void gather(uint64_t count, To* to) {
        while (count > 0) {
            const uint64_t some = std::min(count, left());
            convert(arrays_[index_], offset_, some, to);
            to += some;
            count -= some;
            advance(some);
        }
    }

  private:
    void skip_empty() {
        while (index_ < count_ && offset_ >= arrays_[index_].numel) offset_ -= arrays_[index_++].numel;
    }
    const ConstArray* arrays_;
    size_t count_;
    size_t index_ = 0;
    uint64_t offset_;
};

}  // namespace
}  // namespace gradwire
