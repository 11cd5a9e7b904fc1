// Messages of all kinds, and mutations of their bytes.
#pragma once

#include "patterns.h"

namespace support {

// Return messages with all kinds of chunks.
inline std::vector<Bytes> samples() {
    std::vector<Bytes> all;
    Random random(31);
    for (const double density : {0.0, 0.003, 0.05, 0.2, 0.45, 0.6, 0.7, 0.9, 1.0})
        for (const uint64_t numel : Numbers{90, 1500})
            all.push_back(encode(patterns::at_density(numel, density, random), header_for(numel)));
    patterns::for_every_pattern(1400, random, [&](const Entries& entries) {
        if (all.size() % 2 == 0) all.push_back(encode(entries, header_for(entries.numel)));
    });
    return all;
}

inline void flip_bit(Bytes& bytes, uint64_t bit) {
    bytes[bit / 8] = static_cast<uint8_t>(bytes[bit / 8] ^ 1U << (bit % 8));
}

// Change some bytes after the header.
inline void scramble(Bytes& bytes, Random& random) {
    const uint64_t payload = bytes.size() - gradwire::kHeaderBytes;
    if (payload == 0) return;
    const uint64_t changes = 1 + random.below(8);
    switch (random.below(4)) {
        case 0:
            for (uint64_t i = 0; i < changes; ++i)
                flip_bit(bytes, 8 * gradwire::kHeaderBytes + random.below(8 * payload));
            break;
        case 1:
            for (uint64_t i = 0; i < changes; ++i)
                bytes[gradwire::kHeaderBytes + random.below(payload)] = static_cast<uint8_t>(random.next());
            break;
        case 2: {
            const auto fill = static_cast<uint8_t>(random.chance(0.5) ? 0 : 255);
            const uint64_t from = random.below(payload);
            const uint64_t count = std::min(payload - from, 1 + random.below(40));
            std::fill_n(bytes.begin() + static_cast<std::ptrdiff_t>(gradwire::kHeaderBytes + from), count, fill);
            break;
        }
        default:  // the directory, which is at the front
            for (uint64_t i = 0; i < changes; ++i)
                bytes[gradwire::kHeaderBytes + random.below(std::min<uint64_t>(payload, 12))] =
                    static_cast<uint8_t>(random.next());
    }
}

}  // namespace support
