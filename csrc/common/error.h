// The exceptions of the core. The bindings turn each into the Python class of the same name.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace gradwire {

// Bytes that are not a valid message, or a message that does not fit its target.
struct MessageError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// The update, the residual or their sum held NaN or infinity, and such elements are not skipped.
struct NonFiniteUpdate : std::runtime_error {
    NonFiniteUpdate(uint64_t count_, uint64_t first_index_)
        : std::runtime_error(
              std::to_string(count_) +
              " elements of the update or its sum with the residual are not finite, the first at index " +
              std::to_string(first_index_) +
              "; nothing was sent and the finite part is in the residual: mend the update, or use "
              "on_nonfinite=\"skip\""),
          count(count_),
          first_index(first_index_) {}
    uint64_t count;
    uint64_t first_index;
};

// An instruction set that this machine or this build does not have.
struct BackendUnavailable : std::runtime_error {
    using std::runtime_error::runtime_error;
};

}  // namespace gradwire
