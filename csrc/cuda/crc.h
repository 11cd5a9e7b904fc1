// CRC-32C in parallel: the remainders of slices are computed separately, shifted to their places and XOR-ed.
#pragma once

#include "../common/crc_tables.h"
#include "../common/format.h"
#include "bits.h"

namespace gradwire::cuda {

using Crc4Tables = CrcTables<4>;

inline constexpr uint64_t kCrcSlice = 256;  // bytes

// power[i] = x^(8 * 2^i) shifts by 2^i bytes.
struct ShiftPowers {
    uint32_t power[56];
};
constexpr ShiftPowers make_shift_powers() {
    ShiftPowers powers{};
    uint32_t x = 0x80000000U >> 8;
    for (unsigned i = 0; i < 56; ++i, x = multiply_modulo(x, x)) powers.power[i] = x;
    return powers;
}

GRADWIRE_HD inline uint32_t shift_bytes(const ShiftPowers& powers, uint32_t crc, uint64_t bytes) {
    for (unsigned i = 0; bytes != 0; ++i, bytes >>= 1)
        if (bytes & 1) crc = multiply_modulo(powers.power[i], crc);
    return crc;
}

// Return the remainder of `count` bytes from `from` on, with the header's checksum taken as zero. The message begins
// with the register's initial ones.
GRADWIRE_HD inline uint32_t crc_of_slice(const Crc4Tables& tables, const ByteSource& message, uint64_t from,
                                         uint64_t count) {
    uint32_t crc = from == 0 ? ~uint32_t{0} : 0;
    uint64_t i = 0;
    for (; i + 4 <= count; i += 4) {
        const uint32_t word = from + i == kCrcAt ? 0 : static_cast<uint32_t>(message.word_at(from + i));
        crc ^= word;
        crc = tables.entry[3][crc & 255] ^ tables.entry[2][crc >> 8 & 255] ^ tables.entry[1][crc >> 16 & 255] ^
              tables.entry[0][crc >> 24];
    }
    for (; i < count; ++i) crc = (crc >> 8) ^ tables.entry[0][(crc ^ message.bytes[from + i]) & 255];
    return crc;
}

// Add the whole slices of team `block` of `blocks` to `*sum`, each shifted by the whole slices after it.
template <class Team>
GRADWIRE_TEAM void add_slices(Team& team, unsigned block, unsigned blocks, const Crc4Tables& tables,
                              const ShiftPowers& powers, const ByteSource& message, uint32_t* sum) {
    const uint64_t slices = message.size / kCrcSlice;
    Local<Team, uint64_t> own;
    team.each([&](unsigned thread) {
        uint32_t crc = 0;
        for (uint64_t i = uint64_t{block} * Team::kThreads + thread; i < slices; i += uint64_t{blocks} * Team::kThreads)
            crc ^= shift_bytes(powers, crc_of_slice(tables, message, i * kCrcSlice, kCrcSlice),
                               (slices - 1 - i) * kCrcSlice);
        own[thread] = crc;
    });
    const uint64_t all =
        team.exclusive_scan(own, uint64_t{0}, [](uint64_t a, uint64_t b) -> uint64_t { return a ^ b; });
    team.each([&](unsigned thread) {
        if (thread == 0) atomic_xor(sum, static_cast<uint32_t>(all));
    });
}

// Return the checksum, from the sum of all whole slices; by one thread.
GRADWIRE_HD inline uint32_t finish_crc(const Crc4Tables& tables, const ShiftPowers& powers, const ByteSource& message,
                                       uint32_t sum) {
    const uint64_t whole = message.size / kCrcSlice * kCrcSlice;
    const uint32_t slices = shift_bytes(powers, sum, message.size - whole);
    const uint32_t tail = crc_of_slice(tables, message, whole, message.size - whole);
    return ~(slices ^ tail);
}

}  // namespace gradwire::cuda
