// A long list of arrays, cut into launches with as many arrays as the arguments of a kernel hold.
#pragma once

#include <stdexcept>
#include <string>
#include <vector>

#include "update_arrays.h"

namespace gradwire::cuda {

// One launch: elements [begin, end), where `begin` is a multiple of `step`, and the arrays that hold them.
struct ArrayRange {
    uint64_t begin;
    uint64_t end;
    ArrayTable arrays;
};

struct TooManyArrays : std::invalid_argument {
    using std::invalid_argument::invalid_argument;
};

// Throw TooManyArrays if some `step` elements are in more arrays than one launch can take.
template <class AnyArray>
std::vector<ArrayRange> cut_ranges(const std::vector<AnyArray>& arrays, uint64_t numel, uint64_t step) {
    std::vector<ArrayRange> ranges;
    size_t next = 0;          // the array that holds element `begin`
    uint64_t next_first = 0;  // its first element
    for (uint64_t begin = 0; begin < numel;) {
        ArrayRange range{begin, begin, {}};
        ArrayTable& table = range.arrays;
        size_t last = next;
        uint64_t end = table.begin = next_first;
        for (; last < arrays.size() && table.count < kMostArrays; ++last) {
            if (arrays[last].numel == 0) continue;
            end += arrays[last].numel;
            table.arrays[table.count] = {const_cast<void*>(static_cast<const void*>(arrays[last].data)), end};
            table.dtypes[table.count++] = static_cast<uint8_t>(arrays[last].dtype);
        }
        range.end = end >= numel ? numel : end / step * step;
        if (range.end <= begin)
            throw TooManyArrays("more than " + std::to_string(kMostArrays) + " arrays hold the " +
                                std::to_string(step) + " elements from " + std::to_string(begin) +
                                " on, which is more than a kernel takes: concatenate the smallest of them");
        begin = range.end;
        while (next < arrays.size() && next_first + arrays[next].numel <= begin) next_first += arrays[next++].numel;
        ranges.push_back(range);
    }
    return ranges;
}

}  // namespace gradwire::cuda
