// The kernels of the decoder as its host code sees them. nvcc compiles apply.cu alone; apply.cpp is any C++ compiler's.
#pragma once

#include "decode_chunk.h"
#include "memory.h"

namespace gradwire::cuda {

inline constexpr unsigned kBlock = 256;
inline constexpr unsigned kReadBlock = 1024;   // the directory is read by one block
inline constexpr unsigned kApplyBlocks = 4;    // of one multiprocessor
inline constexpr unsigned kMostMessages = 64;  // of one launch

struct MessageTable {
    uint32_t count = 0;
    const uint8_t* bytes[kMostMessages];
    uint64_t sizes[kMostMessages];

    GRADWIRE_HD ByteSource source(uint32_t i) const { return {bytes[i], sizes[i]}; }
};
struct StatusTable {
    MessageStatus* statuses[kMostMessages];
};

// The totals of the checks of one message.
struct MessageChecks {
    uint32_t crc;
    uint32_t failure;
    uint32_t blocks_done;
};

// The memory of one call: a record for each message, and one word that stops all of them.
struct Work {
    ReadMessage* messages;
    MessageChecks* checks;
    ChunkEntry* entries;  // most_chunks(numel) for each message
    uint64_t entries_each;
    uint32_t* failure;
};

// Described in apply.cu.
struct ApplyKernels {
    void (*read)(MessageTable table, Work work, uint32_t first, uint64_t numel, double scale);
    void (*check)(MessageTable table, StatusTable statuses, Work work, uint32_t first);
    void (*apply)(ByteSource source, ArrayTable targets, Work work, uint32_t index, Part part, uint64_t begin,
                  uint64_t end, double scale);
};
const ApplyKernels& apply_kernels();

}  // namespace gradwire::cuda
