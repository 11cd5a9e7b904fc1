// Message format version 1: the one definition of the layout for C++ and CUDA. docs/message-format.md puts it in words.
//
// The functions here are `static inline` on purpose: this header is compiled under several instruction sets, and a
// function with external linkage could be merged into one copy that the oldest processor cannot run.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__CUDACC__)
#define GRADWIRE_HD __host__ __device__
#else
#define GRADWIRE_HD
#endif

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

// A chunk holds 2^e changed elements, about 4 sqrt(count): many enough to decode in parallel, few enough to be cheap.
GRADWIRE_HD static inline constexpr unsigned chunk_exponent(uint64_t count) {
    const unsigned exponent = bit_length(count > 0 ? count - 1 : 0) / 2 + 2;
    return exponent > kMinChunkExponent ? exponent : kMinChunkExponent;
}

// How a chunk is coded, which follows from its numbers of changed and unchanged elements alone.
struct ChunkShape {
    uint64_t changed;
    uint64_t span;    // changed + unchanged
    uint64_t listed;  // elements whose distances are coded: the rarer kind, roughly
    unsigned rice;    // k, low bits of a distance that are stored as they are; 0 makes the chunk a bitmap
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

// The ceiling of a ternary message: 0.22 bytes (1.76 bits) per element and the header.
static inline constexpr uint64_t max_ternary_bytes(uint64_t numel) { return kHeaderBytes + (22 * numel + 99) / 100; }

// One chunk as a decoder meets it. Bits are counted from the begin of the message's bit stream.
struct Chunk {
    ChunkShape shape;
    uint64_t begin;          // index of its first element
    uint64_t remainder_bit;  // listed fields of `rice` bits
    uint64_t sign_bit;       // changed bits
    uint64_t quotient_bit;   // listed ones, each after its quotient's zeros
    uint64_t quotient_bits;  // the last chunk: up to the end of the stream, padding included
    bool last;
};

// A message in memory that somebody else owns. `payload` has header.payload_bytes bytes.
struct MessageView {
    Header header;
    const uint8_t* payload = nullptr;
    float threshold() const;
    uint64_t nbytes() const { return kHeaderBytes + header.payload_bytes; }
};

// Walks the directory of a ternary message and bounds-checks all it says; throws MessageError.
class ChunkReader {
  public:
    explicit ChunkReader(const MessageView& message);
    bool next(Chunk& chunk);
    const uint8_t* stream() const { return stream_; }
    uint64_t stream_bytes() const { return stream_bytes_; }

  private:
    uint64_t directory_varint();
    ChunkShape read_shape(bool last);
    uint64_t find_stream();

    const uint8_t* payload_;
    uint64_t payload_bytes_;
    uint64_t numel_;
    uint64_t per_chunk_;
    uint64_t changed_left_;
    uint64_t begin_ = 0;
    uint64_t cursor_ = 0;  // in the directory
    uint64_t bit_ = 0;
    const uint8_t* stream_ = nullptr;
    uint64_t stream_bytes_ = 0;
};

// Reads the header at `bytes` and checks all of it but the checksum. Throws MessageError.
MessageView read_message(const uint8_t* bytes, uint64_t available);

// Everything that can be wrong with a message: checksum, directory, every stream. Throws MessageError.
void validate(const MessageView& message);

// The part of `validate` that decoders repeat before they write: directory and streams, not the checksum.
void validate_payload(const MessageView& message);

// "sparse", "bitmap" or "dense".
const char* kind_name(const MessageView& message);

// Writes the 48 bytes with the checksum of header and payload, which must already lie behind them.
void seal_message(const Header& header, uint8_t* bytes);

float bfloat16_to_float(uint16_t bits);
uint16_t float_to_bfloat16(float value);  // nearest-even; NaN stays NaN

}  // namespace gradwire
