// Dense messages: the values of an array, raw.
#pragma once

#include <vector>

#include "common/arrays.h"
#include "message.h"

namespace gradwire {

// Encode the values of float32 or float64 arrays, one after the other; kBfloat16 rounds to nearest-even.
MessageBytes encode_dense(const std::vector<ConstArray>& values, DenseType dtype, uint32_t key, uint32_t step);

// Write the values of a dense message: float64 for a message of float64, otherwise float32.
void decode_dense(const MessageView& message, void* out);

}  // namespace gradwire
