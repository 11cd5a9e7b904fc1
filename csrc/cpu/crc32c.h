// CRC-32C (Castagnoli). Source: RFC 3720, appendix B.4 for the check values.
#pragma once

#include <cstdint>
#include <cstring>
#if defined(__SSE4_2__)
#include <nmmintrin.h>
#elif defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>
#endif

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

uint32_t crc32c(uint32_t crc, const uint8_t* bytes, uint64_t size) {
    for (; size >= 8; size -= 8, bytes += 8) {
        uint64_t word;
        std::memcpy(&word, bytes, 8);
        crc = crc32c_step(crc, word);
    }
    for (; size > 0; --size) crc = crc32c_byte(crc, *bytes++);
    return crc;
}

#else

struct Crc32cTable {
    uint32_t entry[8][256];
    constexpr Crc32cTable() : entry() {
        for (uint32_t i = 0; i < 256; ++i) {
            uint32_t crc = i;
            for (int bit = 0; bit < 8; ++bit) crc = crc & 1 ? (crc >> 1) ^ 0x82f63b78U : crc >> 1;
            entry[0][i] = crc;
        }
        for (uint32_t i = 0; i < 256; ++i)
            for (int t = 1; t < 8; ++t) entry[t][i] = (entry[t - 1][i] >> 8) ^ entry[0][entry[t - 1][i] & 255];
    }
};

// Eight bytes at a time from eight tables. Source: Kounavis and Berry 2005, "slicing by 8".
uint32_t crc32c(uint32_t crc, const uint8_t* bytes, uint64_t size) {
    static constexpr Crc32cTable kTable;
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
