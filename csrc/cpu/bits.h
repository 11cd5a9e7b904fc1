// Bit operations for the translation unit of one instruction set. The functions are in an anonymous namespace, so that
// no copy compiled for a newer processor can be linked into code for an older one.
#pragma once

#include <cstdint>
#include <cstring>
#if defined(__BMI2__)
#include <immintrin.h>
#endif

#include "../common/bits.h"

namespace gradwire {
namespace {

// Return the bits of `word` under `mask`, packed to the low end.
inline uint64_t gather_bits(uint64_t word, uint64_t mask) {
#if defined(__BMI2__)
    return _pext_u64(word, mask);
#else
    uint64_t packed = 0;
    for (uint64_t bit = 1; mask != 0; bit += bit, mask &= mask - 1)
        if (word & mask & (~mask + 1)) packed |= bit;
    return packed;
#endif
}

// Return the low bits of `word`, spread to the set bits of `mask`.
inline uint64_t scatter_bits(uint64_t word, uint64_t mask) {
#if defined(__BMI2__)
    return _pdep_u64(word, mask);
#else
    uint64_t spread = 0;
    for (; mask != 0; word >>= 1, mask &= mask - 1)
        if (word & 1) spread |= mask & (~mask + 1);
    return spread;
#endif
}

// Return the lowest `count` set bits of `mask`.
inline uint64_t lowest_set(uint64_t mask, unsigned count) {
#if defined(__BMI2__)
    return _pdep_u64(low_bits(count), mask);
#else
    uint64_t rest = mask;
    for (unsigned i = 0; i < count; ++i) rest &= rest - 1;
    return mask ^ rest;
#endif
}

// Return one more than the index of the last set bit among the first `bits` bits; 0 if none is set.
inline uint64_t last_one(const uint64_t* words, uint64_t bits) {
    for (uint64_t i = (bits + 63) / 64; i-- > 0;)
        if (words[i] != 0) return i * 64 + 64 - leading_zeros(words[i]);
    return 0;
}

// Appends bit fields to zeroed or unwritten memory. Up to 8 bytes beyond the last bit are written.
class BitWriter {
  public:
    explicit BitWriter(uint64_t* words) : at_(reinterpret_cast<uint8_t*>(words)), begin_(at_) {}

    // Append the low `bits` <= 56 bits of `value`, whose other bits are zero.
    void put(uint64_t value, unsigned bits) {
        pending_ |= value << fill_;
        fill_ += bits;
        std::memcpy(at_, &pending_, sizeof pending_);
        at_ += fill_ >> 3;
        pending_ >>= fill_ & ~7U;
        fill_ &= 7U;
    }
    // The same for up to 64 bits.
    void put_long(uint64_t value, unsigned bits) {
        if (bits <= 56) return put(value, bits);
        put(value & low_bits(32), 32);
        put(value >> 32, bits - 32);
    }
    // Append `zeros` zeros, then a one.
    void put_unary(uint64_t zeros) {
        for (; zeros > 55; zeros -= 56) put(0, 56);
        put(uint64_t{1} << zeros, static_cast<unsigned>(zeros) + 1);
    }
    void finish() { std::memcpy(at_, &pending_, sizeof pending_); }
    uint64_t bits() const { return static_cast<uint64_t>(at_ - begin_) * 8 + fill_; }

  private:
    uint8_t* at_;
    uint8_t* begin_;
    uint64_t pending_ = 0;
    unsigned fill_ = 0;
};

inline constexpr unsigned kWindow = 56;  // fewer bits than BitSource::bits_at always returns

// Reads bit fields from memory that is not padded and may change at any time; never reads beyond its end.
struct BitSource {
    const uint8_t* bytes;
    uint64_t size;

    uint64_t word_at(uint64_t byte) const {
        uint64_t word = 0;
        if (byte + 8 <= size)
            std::memcpy(&word, bytes + byte, 8);
        else
            for (unsigned i = 0; byte + i < size; ++i) word |= uint64_t{bytes[byte + i]} << (8 * i);
        return word;
    }
    // Return at least 57 bits from `bit` on; zeros beyond the end.
    uint64_t bits_at(uint64_t bit) const { return word_at(bit >> 3) >> (bit & 7); }
    // Return 64 bits from `bit` on.
    uint64_t word_at_bit(uint64_t bit) const { return (bits_at(bit) & low_bits(56)) | bits_at(bit + 56) << 56; }
};

}  // namespace
}  // namespace gradwire
