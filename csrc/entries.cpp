// A ternary message as a list of changed elements, for converters and tools.
#include "codec.h"
#include "cpu/walk_chunk.h"
#include "error.h"

namespace gradwire {
namespace {

struct Entries {
    int64_t* positions;
    bool* negative;
    uint64_t room;
    mutable uint64_t found = 0;

    void one(uint64_t position, uint64_t minus) const {
        if (found == room) return;
        positions[found] = static_cast<int64_t>(position);
        negative[found++] = minus != 0;
    }
    void run(uint64_t position, uint64_t elements, const BitSource& source, uint64_t sign_bit) const {
        for (uint64_t i = 0; i < elements; ++i) one(position + i, source.bits_at(sign_bit + i) & 1);
    }
};

}  // namespace

void list_entries(const MessageView& message, int64_t* positions, bool* negative) {
    validate_payload(message);
    ChunkReader reader(message);
    const Entries entries{positions, negative, message.header.count};
    ChunkCursor cursor;
    while (reader.next(cursor.chunk)) {
        walk_chunk({reader.stream(), reader.stream_bytes()}, cursor, 0, message.header.numel, entries);
        cursor = ChunkCursor{};
    }
    if (entries.found != message.header.count) throw MessageError("the message changed while it was decoded");
}

}  // namespace gradwire
