// The streams of a run of chunks, joined to one stream of bits, and their part of the directory.
#pragma once

#include <vector>

#include "cpu/kernels.h"
#include "memory.h"

namespace gradwire {

class ChunkEncoder {
  public:
    void clear();
    // Append a chunk. The last chunk of a message has no directory entry.
    void encode(const ChunkSource& source, bool last);

    const std::vector<uint8_t>& directory() const { return directory_; }
    const uint64_t* bits() const { return stream_.get(); }
    uint64_t bit_count() const { return bit_count_; }

  private:
    void append(const uint64_t* from, uint64_t bits);

    Buffer<uint64_t> remainders_, signs_, quotients_, bitmap_, stream_;
    uint64_t bit_count_ = 0;
    std::vector<uint8_t> directory_;
};

// Append `bits` bits at bit `at` of `to`, word by word. The memory after `at` need not be initialised; one word beyond
// the end may be written.
void append_bits(uint8_t* to, uint64_t at, const uint64_t* from, uint64_t bits);

}  // namespace gradwire
