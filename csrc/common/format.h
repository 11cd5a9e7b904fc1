// Message format version 1: the one definition of the layout for C++ and CUDA. docs/message-format.md describes it.
//
// The functions are `static inline` on purpose: this header is compiled for several instruction sets, and the linker
// could merge functions with external linkage into one copy that the oldest processor cannot run.
#pragma once

#include <cstdint>

#include "host_device.h"

namespace gradwire {

inline constexpr uint32_t kMagic = 0x57445247;  // "GRDW" in little-endian order
inline constexpr uint8_t kVersion = 1;
inline constexpr uint64_t kHeaderBytes = 48;
inline constexpr uint64_t kMaxNumel = uint64_t{1} << 48;  // keeps every product of the shape arithmetic in 64 bits
inline constexpr unsigned kMinChunkExponent = 8;
inline constexpr unsigned kMaxVarintBytes = 7;

enum class Kind : uint8_t { kTernary = 1, kDense = 2 };
enum class DenseType : uint8_t { kNone = 0, kFloat32 = 1, kFloat64 = 2, kBfloat16 = 3 };
inline constexpr uint8_t kFlagShakeUp = 1;

// Byte offsets of the header's fields.
enum Field : unsigned {
    kMagicAt = 0,
    kVersionAt = 4,
    kKindAt = 5,
    kFlagsAt = 6,
    kExponentAt = 7,
    kThresholdAt = 8,
    kDtypeAt = 10,
    kReservedAt = 11,
    kKeyAt = 12,
    kStepAt = 16,
    kCrcAt = 20,
    kNumelAt = 24,
    kCountAt = 32,
    kPayloadBytesAt = 40,
};

struct Header {
    Kind kind = Kind::kTernary;
    uint8_t flags = 0;
    uint8_t exponent = 0;
    DenseType dtype = DenseType::kNone;
    uint16_t threshold = 0;  // bfloat16 bits
    uint32_t key = 0;
    uint32_t step = 0;
    uint32_t crc = 0;
    uint64_t numel = 0;
    uint64_t count = 0;
    uint64_t payload_bytes = 0;
};

template <class T>
GRADWIRE_HD static inline T get_field(const uint8_t* bytes) {
    uint64_t value = 0;
    for (unsigned i = 0; i < sizeof(T); ++i) value |= uint64_t{bytes[i]} << (8 * i);
    return static_cast<T>(value);
}

template <class T>
GRADWIRE_HD static inline void put_field(uint8_t* bytes, T value) {
    for (unsigned i = 0; i < sizeof value; ++i) bytes[i] = static_cast<uint8_t>(uint64_t{value} >> (8 * i));
}

// Write all fields but the checksum, which is left zero.
GRADWIRE_HD static inline void put_header(uint8_t* bytes, const Header& header) {
    for (unsigned i = 0; i < kHeaderBytes; ++i) bytes[i] = 0;
    put_field(bytes + kMagicAt, kMagic);
    bytes[kVersionAt] = kVersion;
    bytes[kKindAt] = static_cast<uint8_t>(header.kind);
    bytes[kFlagsAt] = header.flags;
    bytes[kExponentAt] = header.exponent;
    put_field(bytes + kThresholdAt, header.threshold);
    bytes[kDtypeAt] = static_cast<uint8_t>(header.dtype);
    put_field(bytes + kKeyAt, header.key);
    put_field(bytes + kStepAt, header.step);
    put_field(bytes + kNumelAt, header.numel);
    put_field(bytes + kCountAt, header.count);
    put_field(bytes + kPayloadBytesAt, header.payload_bytes);
}

GRADWIRE_HD static inline constexpr unsigned bit_length(uint64_t value) {
    unsigned length = 0;
    for (unsigned half = 32; half > 0; half /= 2) {
        if (value >> half) {
            value >>= half;
            length += half;
        }
    }
    return length + static_cast<unsigned>(value);
}

// Return e for chunks of 2^e changed elements, about 4 sqrt(count): enough chunks to decode in parallel, few enough to
// keep the directory small.
GRADWIRE_HD static inline constexpr unsigned chunk_exponent(uint64_t count) {
    const unsigned exponent = bit_length(count > 0 ? count - 1 : 0) / 2 + 2;
    return exponent > kMinChunkExponent ? exponent : kMinChunkExponent;
}

// The coding of a chunk. It follows from the numbers of changed and unchanged elements alone.
struct ChunkShape {
    uint64_t changed;
    uint64_t span;    // changed + unchanged
    uint64_t listed;  // elements whose distances are coded: roughly the rarer kind
    unsigned rice;    // k, the low bits of a distance that are stored as they are; 0 makes the chunk a bitmap
    bool inverted;    // the unchanged elements are listed
};

GRADWIRE_HD static inline constexpr ChunkShape chunk_shape(uint64_t changed, uint64_t unchanged) {
    const uint64_t span = changed + unchanged;
    const bool inverted = 20 * unchanged <= 7 * span;
    const uint64_t listed = inverted ? unchanged : changed;
    const unsigned rice = listed == 0 ? 0 : bit_length(32 * (2 * span - listed) / (133 * listed));
    return {changed, span, listed, rice, inverted};
}

GRADWIRE_HD static inline constexpr uint64_t bytes_per_value(DenseType dtype) {
    return dtype == DenseType::kFloat64 ? 8 : dtype == DenseType::kFloat32 ? 4 : dtype == DenseType::kBfloat16 ? 2 : 0;
}

// Return the ceiling of a ternary message: 0.22 bytes (1.76 bits) per element and the header.
static inline constexpr uint64_t max_ternary_bytes(uint64_t numel) { return kHeaderBytes + (22 * numel + 99) / 100; }

// One chunk as a decoder sees it. Bit positions are counted from the start of the message's bit stream.
struct Chunk {
    ChunkShape shape;
    uint64_t begin;          // index of its first element
    uint64_t remainder_bit;  // listed fields of `rice` bits
    uint64_t sign_bit;       // changed bits
    uint64_t quotient_bit;   // listed ones, each after its quotient's zeros
    uint64_t quotient_bits;  // the last chunk: up to the end of the stream, padding included
    bool last;
};

}  // namespace gradwire
