// Pass 2: from the list of mask words to the bytes of a ternary message.
#pragma once

#include <vector>

#include "chunk_encoder.h"
#include "message.h"

namespace gradwire {

// Reuses its working memory from message to message.
class TernaryEncoder {
  public:
    // Encode a list of mask words with `changed` changed elements. `header` needs flags, threshold, key, step and
    // numel.
    MessageBytes encode(const MaskWord* words, uint64_t word_count, uint64_t changed, Header header,
                        unsigned threads = 1);

    // Return a lower bound of the message's size: without the quotients of its distances.
    static uint64_t least_bytes(const MaskWord* words, uint64_t word_count, uint64_t changed, uint64_t numel);

  private:
    std::vector<ChunkEncoder> encoders_;  // one for each thread
};

}  // namespace gradwire
