// More bit operations, a writer for runs of bits next to those of other threads, and a bounded reader.
#pragma once

#include <cstdint>
#include <cstring>

#include "../common/bits.h"
#include "team.h"

namespace gradwire::cuda {

// Return the index of the `rank`-th set bit, counted from 0; more than `rank` bits are set.
GRADWIRE_HD inline unsigned nth_bit(uint64_t word, unsigned rank) {
    for (; rank > 0; --rank) word &= word - 1;
    return trailing_zeros(word);
}

// Pack the low four bits of each of eight bytes.
GRADWIRE_HD inline uint32_t pack_nibbles(uint64_t bytes) {
    bytes &= 0x0f0f0f0f0f0f0f0fU;
    bytes = (bytes | bytes >> 4) & 0x00ff00ff00ff00ffU;
    bytes = (bytes | bytes >> 8) & 0x0000ffff0000ffffU;
    return static_cast<uint32_t>(bytes | bytes >> 16);
}

GRADWIRE_HD inline unsigned varint_bytes(uint64_t value) {
    unsigned bytes = 1;
    for (; value >= 0x80; value >>= 7) ++bytes;
    return bytes;
}
GRADWIRE_HD inline uint8_t* put_varint(uint8_t* to, uint64_t value) {
    for (; value >= 0x80; value >>= 7) *to++ = static_cast<uint8_t>(value | 0x80);
    *to++ = static_cast<uint8_t>(value);
    return to;
}

// Writes a run of bits into words that are zero. Words inside the run are stored; the first and the last may hold bits
// of other threads' runs and are OR-ed.
class BitRunWriter {
  public:
    GRADWIRE_HD BitRunWriter(uint32_t* words, uint64_t bit)
        : word_(words + bit / 32), fill_(static_cast<unsigned>(bit % 32)), shared_(fill_ > 0) {}

    // Append up to 32 bits; those above `bits` are zero.
    GRADWIRE_HD void put(uint32_t value, unsigned bits) {
        pending_ |= uint64_t{value} << fill_;
        fill_ += bits;
        if (fill_ >= 32) store();
    }
    GRADWIRE_HD void put_long(uint64_t value, unsigned bits) {
        if (bits > 32) {
            put(static_cast<uint32_t>(value), 32);
            put(static_cast<uint32_t>(value >> 32), bits - 32);
        } else {
            put(static_cast<uint32_t>(value), bits);
        }
    }
    GRADWIRE_HD void skip(uint64_t zeros) {
        const uint64_t fill = fill_ + zeros;
        if (fill >= 32) {
            store();
            word_ += fill / 32 - 1;
        }
        fill_ = static_cast<unsigned>(fill % 32);
    }
    GRADWIRE_HD void put_unary(uint64_t zeros) {
        skip(zeros);
        put(1, 1);
    }
    GRADWIRE_HD void finish() {
        if (fill_ > 0 && pending_ != 0) atomic_or(word_, static_cast<uint32_t>(pending_));
    }

  private:
    GRADWIRE_HD void store() {
        if (shared_)
            atomic_or(word_, static_cast<uint32_t>(pending_));
        else
            *word_ = static_cast<uint32_t>(pending_);
        shared_ = false;
        ++word_;
        pending_ >>= 32;
        fill_ -= 32;
    }

    uint32_t* word_;
    uint64_t pending_ = 0;
    unsigned fill_;
    bool shared_;
};

// Reads bits of memory at any alignment that may have changed since it was checked. Never reads beyond `size` bytes;
// returns zeros there.
struct ByteSource {
    const uint8_t* bytes;
    uint64_t size;

    GRADWIRE_HD uint64_t word_at(uint64_t byte) const {
        uint64_t word = 0;
        if (byte + 12 <= size) return whole_word_at(bytes + byte);
        for (unsigned i = 0; i < 8; ++i)
            if (byte + i < size) word |= uint64_t{bytes[byte + i]} << (8 * i);
        return word;
    }
    // Return at least 57 bits from `bit` on.
    GRADWIRE_HD uint64_t bits_at(uint64_t bit) const { return word_at(bit >> 3) >> (bit & 7); }

  private:
    // Reads up to four bytes beyond the eight.
    GRADWIRE_HD static uint64_t whole_word_at(const uint8_t* at) {
#if defined(__CUDA_ARCH__)
        const auto address = reinterpret_cast<uintptr_t>(at);
        const unsigned shift = static_cast<unsigned>(address & 3) * 8;
        const auto* words = reinterpret_cast<const uint32_t*>(address & ~uintptr_t{3});
        const uint32_t a = words[0], b = words[1];
        if (shift == 0) return uint64_t{b} << 32 | a;
        const uint32_t c = words[2];
        return uint64_t{__funnelshift_r(b, c, shift)} << 32 | __funnelshift_r(a, b, shift);
#else
        uint64_t word;
        std::memcpy(&word, at, 8);
        return word;
#endif
    }
};

// Reads fields of at most 57 bits, one after the other, with few loads.
class BitReader {
  public:
    GRADWIRE_HD BitReader(const ByteSource& source, uint64_t bit) : source_(source), bit_(bit) {}

    GRADWIRE_HD uint64_t next(unsigned bits) {
        if (left_ < bits) {
            word_ = source_.bits_at(bit_);
            left_ = 57;
        }
        const uint64_t value = word_ & low_bits(bits);
        word_ >>= bits;
        left_ -= bits;
        bit_ += bits;
        return value;
    }

  private:
    const ByteSource& source_;
    uint64_t bit_;
    uint64_t word_ = 0;
    unsigned left_ = 0;
};

}  // namespace gradwire::cuda
