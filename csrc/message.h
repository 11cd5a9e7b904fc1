// Messages in host memory: owned or borrowed bytes, reading, validating and sealing them.
#pragma once

#include "common/format.h"
#include "memory.h"

namespace gradwire {

// A message in memory of the caller's. `payload` has header.payload_bytes bytes and follows the header's 48.
struct MessageView {
    Header header;
    const uint8_t* payload = nullptr;
    float threshold() const;
    uint64_t nbytes() const { return kHeaderBytes + header.payload_bytes; }
};

// An owned message.
struct MessageBytes {
    Memory<uint8_t> bytes;
    uint64_t size = 0;
    Header header;
    MessageView view() const { return {header, bytes.get() + kHeaderBytes}; }
};

// Return memory for a message of this header, and 16 bytes more for writers of whole words. The bytes are not written.
MessageBytes allocate_message(const Header& header);

// Write the header's 48 bytes with the checksum of header and payload; the payload must already be in its place.
void seal_message(MessageBytes& message);

// Read the header at `bytes` and check everything but the checksum. Throw MessageError.
MessageView read_message(const uint8_t* bytes, uint64_t available);

// Check everything: checksum, directory and every stream. Throw MessageError.
void validate(const MessageView& message);

// The part of `validate` that decoders repeat before they write: directory and streams, not the checksum.
void validate_payload(const MessageView& message);

// Return "sparse", "bitmap" or "dense".
const char* kind_name(const MessageView& message);

// Walks the directory of a ternary message and checks that its numbers stay within the message. Throws MessageError.
class ChunkReader {
  public:
    explicit ChunkReader(const MessageView& message);
    // Return false after the last chunk.
    bool next(Chunk& chunk);
    const uint8_t* stream() const { return stream_; }
    uint64_t stream_bytes() const { return stream_bytes_; }

  private:
    uint64_t read_varint();
    ChunkShape read_shape(bool last);
    uint64_t find_stream();

    const uint8_t* payload_;
    uint64_t payload_bytes_;
    uint64_t numel_;
    uint64_t per_chunk_;
    uint64_t changed_left_;
    uint64_t begin_ = 0;
    uint64_t cursor_ = 0;  // in the directory
    uint64_t bit_ = 0;
    const uint8_t* stream_ = nullptr;
    uint64_t stream_bytes_ = 0;
};

}  // namespace gradwire
