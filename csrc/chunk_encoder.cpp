#include "chunk_encoder.h"

namespace gradwire {
namespace {

uint64_t words_for(uint64_t bits) { return (bits + 63) / 64; }

void append_varint(std::vector<uint8_t>& bytes, uint64_t value) {
    for (; value >= 0x80; value >>= 7) bytes.push_back(static_cast<uint8_t>(value | 0x80));
    bytes.push_back(static_cast<uint8_t>(value));
}

}  // namespace

void append_bits(uint8_t* to, uint64_t at, const uint64_t* from, uint64_t bits) {
    const unsigned shift = at & 63;
    uint8_t* out = to + at / 64 * 8;
    uint64_t carry = 0;
    if (shift > 0) {
        std::memcpy(&carry, out, 8);
        carry &= (uint64_t{1} << shift) - 1;
    }
    const uint64_t words = words_for(bits);
    for (uint64_t i = 0; i < words; ++i, out += 8) {
        const uint64_t word = carry | from[i] << shift;
        std::memcpy(out, &word, 8);
        carry = shift > 0 ? from[i] >> (64 - shift) : 0;
    }
    std::memcpy(out, &carry, 8);
}

void ChunkEncoder::clear() {
    bit_count_ = 0;
    directory_.clear();
}

void ChunkEncoder::encode(const ChunkSource& source, bool last) {
    const ChunkShape& shape = source.shape;
    const uint64_t most_quotients = shape.listed + ((shape.span - shape.listed) >> shape.rice);
    // A write may reach 8 bytes beyond its last bit, and kernels write the zeros after the last listed element first.
    const ChunkStreams streams{remainders_.reserve(words_for(shape.listed * shape.rice) + 2),
                               signs_.reserve(words_for(shape.changed) + 2),
                               quotients_.reserve(words_for(most_quotients) + 4),
                               bitmap_.reserve(shape.rice <= kMostDenseRice ? words_for(shape.span) + 2 : 0)};
    const uint64_t quotient_bits = kernels().encode_chunk(source, streams);
    const uint64_t remainder_bits = shape.listed * shape.rice;
    stream_.reserve_keeping(words_for(bit_count_),
                            words_for(bit_count_ + remainder_bits + shape.changed + quotient_bits) + 2);
    append(streams.remainders, remainder_bits);
    append(streams.signs, shape.changed);
    append(streams.quotients, quotient_bits);
    if (last) return;
    append_varint(directory_, shape.span - shape.changed);
    if (shape.rice > 0) append_varint(directory_, quotient_bits - shape.listed);
}

void ChunkEncoder::append(const uint64_t* from, uint64_t bits) {
    if (bits == 0) return;
    append_bits(reinterpret_cast<uint8_t*>(stream_.get()), bit_count_, from, bits);
    bit_count_ += bits;
}

}  // namespace gradwire
