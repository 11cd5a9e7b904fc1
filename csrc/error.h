// The exceptions that the core throws. The bindings turn each into the Python class of the same name.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace gradwire {

// Bytes that are no valid message, or a message that does not fit where it is applied.
struct MessageError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// An update held NaN or infinity (or its sum with the residual overflowed) and the caller wants to know.
struct NonFiniteUpdate : std::runtime_error {
    NonFiniteUpdate(const std::string& what, uint64_t count_, uint64_t first_index_)
        : std::runtime_error(what), count(count_), first_index(first_index_) {}
    uint64_t count;
    uint64_t first_index;
};

// An instruction set that this machine or this build does not have.
struct BackendUnavailable : std::runtime_error {
    using std::runtime_error::runtime_error;
};

}  // namespace gradwire
