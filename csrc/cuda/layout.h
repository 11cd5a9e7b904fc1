// The layout of a message: the first bit of each chunk, the directory, the header, and zeros where bits will be
// written.
#pragma once

#include "encode_chunk.h"

namespace gradwire::cuda {

// The fields of a header that do not follow from the data.
struct HeaderWords {
    uint16_t threshold;
    uint8_t flags;
    uint32_t key;
    uint32_t step;
};

GRADWIRE_HD inline ChunkShape shape_of(const ChunkRecord& record, uint64_t changed) {
    return chunk_shape(changed, record.end - record.begin - changed);
}

GRADWIRE_HD inline uint64_t chunk_bits(const ChunkShape& shape, uint64_t quotients) {
    return shape.listed * shape.rice + shape.changed + shape.listed + quotients;
}

// Each of `blocks` teams scans the chunks, which are few, and clears its share of the message in whole words. The first
// team also records the places of the chunks and writes the header and the directory.
template <class Team>
GRADWIRE_TEAM void layout_message(Team& team, unsigned block, unsigned blocks, const Masks& masks,
                                  const HeaderWords& words, Plan* plan, ChunkRecord* records, uint32_t* message) {
    const Plan before = *plan;
    uint64_t bits = 0, directory = 0;
    for (uint64_t base = 0; base < before.chunks; base += Team::kThreads) {
        Local<Team, uint64_t> own_bits, own_bytes;
        team.each([&](unsigned thread) {
            const uint64_t index = base + thread;
            own_bits[thread] = own_bytes[thread] = 0;
            if (index >= before.chunks) return;
            const ChunkShape shape = shape_of(records[index], before.changed_in(index));
            own_bits[thread] = chunk_bits(shape, records[index].quotients);
            if (index + 1 == before.chunks) return;
            own_bytes[thread] = varint_bytes(shape.span - shape.changed);
            if (shape.rice > 0) own_bytes[thread] += varint_bytes(records[index].quotients);
        });
        const uint64_t all_bits = exclusive_sum(team, own_bits);
        const uint64_t all_bytes = exclusive_sum(team, own_bytes);
        team.each([&](unsigned thread) {
            if (block > 0 || base + thread >= before.chunks) return;
            records[base + thread].bit = bits + own_bits[thread];
            records[base + thread].directory_byte = directory + own_bytes[thread];
        });
        bits += all_bits;
        directory += all_bytes;
    }
    const uint64_t payload_bytes = directory + (bits + 7) / 8;
    const uint64_t head_words = (kHeaderBytes + directory + 3) / 4;
    const uint64_t all_words = (kHeaderBytes + payload_bytes + 3) / 4;
    team.each([&](unsigned thread) {
        if (block == 0)
            for (uint64_t i = thread; i < head_words; i += Team::kThreads) message[i] = 0;
        for (uint64_t i = head_words + uint64_t{block} * Team::kThreads + thread; i < all_words;
             i += uint64_t{blocks} * Team::kThreads)
            message[i] = 0;
    });
    if (block > 0) return;
    auto* bytes = reinterpret_cast<uint8_t*>(message);
    team.each([&](unsigned thread) {
        for (uint64_t index = thread; index + 1 < before.chunks; index += Team::kThreads) {
            const ChunkShape shape = shape_of(records[index], before.changed_in(index));
            uint8_t* to = bytes + kHeaderBytes + records[index].directory_byte;
            to = put_varint(to, shape.span - shape.changed);
            if (shape.rice > 0) put_varint(to, records[index].quotients);
        }
        if (thread > 0) return;
        plan->directory_bytes = directory;
        plan->stream_bits = bits;
        Header header;
        header.flags = words.flags;
        header.exponent = static_cast<uint8_t>(before.exponent);
        header.threshold = words.threshold;
        header.key = words.key;
        header.step = words.step;
        header.numel = masks.numel;
        header.count = before.count;
        header.payload_bytes = payload_bytes;
        put_header(bytes, header);
    });
}

}  // namespace gradwire::cuda
