// The CUDA decoder's algorithms, kernel by kernel, on teams of emulated threads.
#pragma once

#include "cuda/decode_chunk.h"
#include "emulated_encoder.h"

namespace support {

class EmulatedDecoder {
  public:
    EmulatedDecoder(const Bytes& bytes, uint64_t numel, double scale, bool backwards)
        : source_{bytes.data(), bytes.size()},
          scale_(scale),
          block_(backwards),
          entries_(garbage_filled<gradwire::cuda::ChunkEntry>(gradwire::cuda::most_chunks(numel))) {
        gradwire::cuda::DirectoryShared shared;
        read_message(block_, source_, numel, scale, &message, entries_.get(), shared);
    }

    // Return why the message is refused, or kSound.
    uint32_t failure(bool with_checksum = true) {
        using namespace gradwire::cuda;
        if (message.failure != kSound) return message.failure;
        const uint64_t size = gradwire::kHeaderBytes + message.payload_bytes;
        if (with_checksum && emulated_crc(source_.bytes, size, false) != message.crc) return kBadChecksum;
        const ByteSource stream{source_.bytes + gradwire::kHeaderBytes + message.directory_bytes,
                                message.payload_bytes - message.directory_bytes};
        for (uint64_t i = 0; i < message.chunks; ++i)
            if (check_chunk(block_, stream, OpenChunk(message, entries_[i], i)) != kSound) return kBadStream;
        return kSound;
    }

    // Add to elements [begin, end) of the targets, whether or not the message is valid.
    void apply(const gradwire::cuda::ArrayTable& targets, uint64_t begin, uint64_t end) {
        constexpr unsigned kBlocks = 3;
        for (unsigned block = 0; block < kBlocks; ++block)
            apply_message(block_, block, kBlocks, source_, message, entries_.get(), scale_, targets,
                          {gradwire::undivided(end), 0}, begin, end);
    }

    gradwire::cuda::ReadMessage message;

  private:
    gradwire::cuda::ByteSource source_;
    double scale_;
    Block block_;
    std::unique_ptr<gradwire::cuda::ChunkEntry[]> entries_;
};

}  // namespace support
