// Dense messages: the values of an array, raw.
#pragma once

#include <vector>

#include "common/arrays.h"
#include "message.h"

namespace gradwire {

// Encode the values of float32 or float64 arrays, one after the other; kBfloat16 rounds to nearest-even.
MessageBytes encode_dense(const std::vector<ConstArray>& values, DenseType dtype, uint32_t key, uint32_t step);

// The same in three steps: return a message without values; write values of an array at a place of its payload; and
// `seal_message`.
MessageBytes allocate_dense(uint64_t numel, DenseType dtype, uint32_t key, uint32_t step);
void put_dense(const ConstArray& values, DenseType dtype, uint8_t* out);

// Write the values of a dense message: float64 for a message of float64, otherwise float32.
void decode_dense(const MessageView& message, void* out);

}  // namespace gradwire
