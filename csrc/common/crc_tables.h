// The tables of CRC-32C for several bytes at a time. Source: Kounavis and Berry 2005, "slicing by 8".
#pragma once

#include <cstdint>

namespace gradwire {

inline constexpr uint32_t kCrcPolynomial = 0x82f63b78U;

// An aggregate, for the shared memory of a CUDA block.
template <unsigned kBytes>
struct CrcTables {
    uint32_t entry[kBytes][256];
};

template <unsigned kBytes>
constexpr CrcTables<kBytes> make_crc_tables() {
    CrcTables<kBytes> tables{};
    for (uint32_t i = 0; i < 256; ++i) {
        uint32_t crc = i;
        for (int bit = 0; bit < 8; ++bit) crc = crc & 1 ? (crc >> 1) ^ kCrcPolynomial : crc >> 1;
        tables.entry[0][i] = crc;
    }
    for (uint32_t i = 0; i < 256; ++i)
        for (unsigned t = 1; t < kBytes; ++t)
            tables.entry[t][i] = (tables.entry[t - 1][i] >> 8) ^ tables.entry[0][tables.entry[t - 1][i] & 255];
    return tables;
}

}  // namespace gradwire
