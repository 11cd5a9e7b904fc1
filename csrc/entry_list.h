// The changed elements of a ternary message as a list, for converters and tools.
#pragma once

#include "message.h"

namespace gradwire {

// Write the positions in order, and which elements are negative: header.count of each. Throw MessageError.
void list_entries(const MessageView& message, int64_t* positions, bool* negative);

}  // namespace gradwire
