// gradwire.Partition and gradwire.Part, whose part `first` is the core's part 0.
#pragma once

#include <pybind11/pybind11.h>

#include <optional>

#include "../common/format.h"
#include "../common/partition.h"

namespace gradwire::bindings {

namespace py = pybind11;

inline Partition partition_of(const py::object& partition) {
    const auto field = [&](const char* name) { return partition.attr(name).cast<uint64_t>(); };
    return {field("numel"), field("parts"), bit_length(field("block")) - 1};
}

// Return nothing for None.
inline std::optional<Part> part_of(const py::object& part) {
    if (part.is_none()) return {};
    return Part{partition_of(part.attr("partition")), part.attr("position").cast<uint64_t>()};
}

// Return the core's number of part `index` of a partition.
inline uint64_t position_of(const py::object& partition, uint64_t index) {
    const auto parts = partition.attr("parts").cast<uint64_t>();
    return (index + parts - partition.attr("first").cast<uint64_t>()) % parts;
}

}  // namespace gradwire::bindings
