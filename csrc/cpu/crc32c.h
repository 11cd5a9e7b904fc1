// CRC-32C (Castagnoli). Source: RFC 3720, appendix B.4 for the check values.
#pragma once

#include <cstdint>
#include <cstring>
#if defined(__SSE4_2__)
#include <nmmintrin.h>
#elif defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>
#else
#include "../common/crc_tables.h"
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
