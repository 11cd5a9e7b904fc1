// CRC-32C (Castagnoli). Source: RFC 3720, appendix B.4 for the check values.
#pragma once

#include <cstdint>
#include <cstring>
#if defined(__SSE4_2__)
#include <nmmintrin.h>
#elif defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>
#endif

#include "../common/crc_tables.h"

namespace gradwire {
namespace {

#if defined(__SSE4_2__) || defined(__ARM_FEATURE_CRC32)

inline uint32_t crc32c_step(uint32_t crc, uint64_t word) {
#if defined(__SSE4_2__)
    return static_cast<uint32_t>(_mm_crc32_u64(crc, word));
#else
    return __crc32cd(crc, word);
#endif
}
inline uint32_t crc32c_byte(uint32_t crc, uint8_t byte) {
#if defined(__SSE4_2__)
    return _mm_crc32_u8(crc, byte);
#else
    return __crc32cb(crc, byte);
#endif
}

inline uint64_t word_at(const uint8_t* bytes) {
    uint64_t word;
    std::memcpy(&word, bytes, 8);
    return word;
}

// Moves a remainder before the bytes of a lane.
constexpr uint64_t kCrcLane = 4096;
struct LaneShift {
    uint32_t entry[4][256];
    constexpr LaneShift() : entry() {
        uint32_t lane = 0x80000000U >> 8;  // x^8: one byte
        for (uint64_t bytes = 1; bytes < kCrcLane; bytes *= 2) lane = multiply_modulo(lane, lane);
        for (unsigned byte = 0; byte < 4; ++byte)
            for (uint32_t value = 0; value < 256; ++value)
                entry[byte][value] = multiply_modulo(value << (8 * byte), lane);
    }
    constexpr uint32_t operator()(uint32_t crc) const {
        return entry[0][crc & 255] ^ entry[1][crc >> 8 & 255] ^ entry[2][crc >> 16 & 255] ^ entry[3][crc >> 24];
    }
};

uint32_t crc32c(uint32_t crc, const uint8_t* bytes, uint64_t size) {
    // An instruction waits three cycles for the one before it, so three lanes take the time of one.
    static constexpr LaneShift kShift;
    for (; size >= 3 * kCrcLane; size -= 3 * kCrcLane, bytes += 3 * kCrcLane) {
        uint32_t second = 0, third = 0;
        for (uint64_t at = 0; at < kCrcLane; at += 8) {
            crc = crc32c_step(crc, word_at(bytes + at));
            second = crc32c_step(second, word_at(bytes + kCrcLane + at));
            third = crc32c_step(third, word_at(bytes + 2 * kCrcLane + at));
        }
        crc = kShift(kShift(crc) ^ second) ^ third;
    }
    for (; size >= 8; size -= 8, bytes += 8) crc = crc32c_step(crc, word_at(bytes));
    for (; size > 0; --size) crc = crc32c_byte(crc, *bytes++);
    return crc;
}

#else

uint32_t crc32c(uint32_t crc, const uint8_t* bytes, uint64_t size) {
    static constexpr CrcTables<8> kTable = make_crc_tables<8>();
    for (; size >= 8; size -= 8, bytes += 8) {
        uint64_t word;
        std::memcpy(&word, bytes, 8);
        word ^= crc;
        crc = 0;
        for (int i = 0; i < 8; ++i) crc ^= kTable.entry[7 - i][(word >> (8 * i)) & 255];
    }
    for (; size > 0; --size) crc = (crc >> 8) ^ kTable.entry[0][(crc ^ *bytes++) & 255];
    return crc;
}

#endif

}  // namespace
}  // namespace gradwire
