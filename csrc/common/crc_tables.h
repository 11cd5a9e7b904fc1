// The tables of CRC-32C for several bytes at a time, and what joins the remainders of parts: that of a concatenation is
// the first part's, times x^(bits of the second), plus the second's. Sources: Kounavis and Berry 2005, "slicing by 8";
// M. Adler's crc32_combine (zlib). Arithmetic is modulo P in reflected order, where bit 31 is x^0.
#pragma once

#include <cstdint>

#include "host_device.h"

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

GRADWIRE_HD inline constexpr uint32_t multiply_modulo(uint32_t a, uint32_t b) {
    uint32_t product = 0;
    for (unsigned i = 0; i < 32; ++i) {
        if (a & (0x80000000U >> i)) product ^= b;
        b = b & 1 ? (b >> 1) ^ kCrcPolynomial : b >> 1;
    }
    return product;
}

}  // namespace gradwire
