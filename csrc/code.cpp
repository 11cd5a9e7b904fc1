// Pass 2: from the list of mask words to the bytes of a message.
#include <algorithm>
#include <cstring>
#include <new>

#include "codec.h"
#include "cpu/bits.h"
#include "parallel.h"

namespace gradwire {
namespace {

// Memory that grows without keeping its contents, or with them.
class WordBuffer {
  public:
    uint64_t* discard_and_reserve(uint64_t words) {
        if (words > capacity_) grow(words, 0);
        return words_.get();
    }
    uint64_t* keep_and_reserve(uint64_t used, uint64_t words) {
        if (words > capacity_) grow(std::max(words, capacity_ * 2), used);
        return words_.get();
    }

  private:
    void grow(uint64_t words, uint64_t used) {
        Memory<uint64_t> larger(static_cast<uint64_t*>(std::malloc(words * 8)));
        if (!larger) throw std::bad_alloc();
        if (used > 0) std::memcpy(larger.get(), words_.get(), used * 8);
        words_ = std::move(larger);
        capacity_ = words;
    }
    Memory<uint64_t> words_;
    uint64_t capacity_ = 0;
};

uint64_t words_for(uint64_t bits) { return (bits + 63) / 64; }

// Appends `bits` bits at bit `at` of `to`, word by word. The words of `to` behind `at` need not be initialised, and one
// word beyond the end may be written.
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

void append_varint(std::vector<uint8_t>& bytes, uint64_t value) {
    for (; value >= 0x80; value >>= 7) bytes.push_back(static_cast<uint8_t>(value | 0x80));
    bytes.push_back(static_cast<uint8_t>(value));
}

// Splits the list into chunks: where each begins and how it will be coded.
std::vector<ChunkSource> plan_chunks(const MaskWord* words, uint64_t word_count, uint64_t changed, uint64_t numel) {
    const uint64_t per_chunk = uint64_t{1} << chunk_exponent(changed);
    std::vector<ChunkSource> chunks;
    chunks.reserve((changed + per_chunk - 1) / per_chunk);
    const MaskWord* last = words + word_count;
    const MaskWord* word = words;
    unsigned skip = 0;
    uint64_t begin = 0;
    for (uint64_t left = changed; left > 0;) {
        const uint64_t own = std::min(left, per_chunk);
        const ChunkSource start{word, last, skip, begin, {}};
        uint64_t wanted = own + skip;  // changed bits to pass, from the begin of `word`
        while (wanted > 0) {
            const unsigned here = popcount(word->changed);
            if (here > wanted) break;
            wanted -= here;
            ++word;
        }
        skip = static_cast<unsigned>(wanted);
        left -= own;
        uint64_t end = numel;
        if (left > 0) {
            const MaskWord& final_word = skip > 0 ? *word : word[-1];
            const uint64_t bits = skip > 0 ? lowest_set(final_word.changed, skip) : final_word.changed;
            end = final_word.index * 64 + 64 - leading_zeros(bits);
        }
        chunks.push_back(start);
        chunks.back().shape = chunk_shape(own, end - begin - own);
        begin = end;
    }
    return chunks;
}

// Codes a run of chunks, one behind the other, from bit 0 on.
class ChunkCoder {
  public:
    void code(const ChunkSource& source, bool last) {
        const ChunkShape& shape = source.shape;
        const uint64_t most_quotients = shape.listed + ((shape.span - shape.listed) >> shape.rice);
        const ChunkStreams streams{remainders_.discard_and_reserve(words_for(shape.listed * shape.rice) + 2),
                                   signs_.discard_and_reserve(words_for(shape.changed) + 2),
                                   quotients_.discard_and_reserve(words_for(most_quotients) + 2)};
        const uint64_t quotient_bits = kernels().encode_chunk(source, streams);
        reserve(shape.listed * shape.rice + shape.changed + quotient_bits);
        append(streams.remainders, shape.listed * shape.rice);
        append(streams.signs, shape.changed);
        append(streams.quotients, quotient_bits);
        if (last) return;
        append_varint(directory_, shape.span - shape.changed);
        if (shape.rice > 0) append_varint(directory_, quotient_bits - shape.listed);
    }
    const std::vector<uint8_t>& directory() const { return directory_; }
    const uint64_t* bits() const { return bits_; }
    uint64_t bit_count() const { return bit_count_; }

  private:
    void reserve(uint64_t more) {
        bits_ = stream_.keep_and_reserve(words_for(bit_count_), words_for(bit_count_ + more) + 2);
    }
    void append(const uint64_t* from, uint64_t bits) {
        if (bits == 0) return;
        append_bits(reinterpret_cast<uint8_t*>(bits_), bit_count_, from, bits);
        bit_count_ += bits;
    }
    WordBuffer remainders_, signs_, quotients_, stream_;
    uint64_t* bits_ = nullptr;
    uint64_t bit_count_ = 0;
    std::vector<uint8_t> directory_;
};

MessageBytes allocate_message(const Header& header) {
    MessageBytes message;
    message.header = header;
    message.size = kHeaderBytes + header.payload_bytes;
    message.bytes.reset(static_cast<uint8_t*>(std::malloc(message.size + 16)));  // append_bits writes whole words
    if (!message.bytes) throw std::bad_alloc();
    return message;
}

}  // namespace

MessageBytes code_ternary(const MaskWord* words, uint64_t word_count, uint64_t changed, Header header,
                          unsigned threads) {
    header.kind = Kind::kTernary;
    header.count = changed;
    header.exponent = static_cast<uint8_t>(chunk_exponent(changed));
    const std::vector<ChunkSource> chunks = plan_chunks(words, word_count, changed, header.numel);
    const uint64_t count = chunks.size();
    threads = static_cast<unsigned>(std::clamp<uint64_t>(count / 8, 1, threads));
    std::vector<ChunkCoder> coders(threads);
    run_parallel(threads, [&](unsigned t) {
        for (uint64_t i = count * t / threads; i < count * (t + 1) / threads; ++i) coders[t].code(chunks[i], i + 1 == count);
    });
    uint64_t bits = 0;
    uint64_t directory_bytes = 0;
    for (const ChunkCoder& coder : coders) {
        bits += coder.bit_count();
        directory_bytes += coder.directory().size();
    }
    header.payload_bytes = directory_bytes + (bits + 7) / 8;
    MessageBytes message = allocate_message(header);
    uint8_t* directory = message.bytes.get() + kHeaderBytes;
    uint8_t* stream = directory + directory_bytes;
    uint64_t at = 0;
    for (const ChunkCoder& coder : coders) {
        directory = std::copy(coder.directory().begin(), coder.directory().end(), directory);
        if (coder.bit_count() > 0) append_bits(stream, at, coder.bits(), coder.bit_count());
        at += coder.bit_count();
    }
    seal_message(message.header, message.bytes.get());
    return message;
}

namespace {

uint8_t* put_values(const ConstArray& values, DenseType dtype, uint8_t* out) {
    const auto copy = [&](const auto* from, auto convert) {
        for (uint64_t i = 0; i < values.numel; ++i) {
            const auto value = convert(from[i]);
            std::memcpy(out, &value, sizeof value);
            out += sizeof value;
        }
    };
    const auto convert_all = [&](const auto* from) {
        if (dtype == DenseType::kFloat32) copy(from, [](auto v) { return static_cast<float>(v); });
        if (dtype == DenseType::kFloat64) copy(from, [](auto v) { return static_cast<double>(v); });
        if (dtype == DenseType::kBfloat16)
            copy(from, [](auto v) { return float_to_bfloat16(static_cast<float>(v)); });
    };
    if (values.dtype == Dtype::kFloat64)
        convert_all(static_cast<const double*>(values.data));
    else
        convert_all(static_cast<const float*>(values.data));
    return out;
}

}  // namespace

MessageBytes code_dense(const ConstArray& values, DenseType dtype, uint32_t key, uint32_t step) {
    Header header;
    header.kind = Kind::kDense;
    header.dtype = dtype;
    header.key = key;
    header.step = step;
    header.numel = header.count = values.numel;
    header.payload_bytes = values.numel * bytes_per_value(dtype);
    MessageBytes message = allocate_message(header);
    put_values(values, dtype, message.bytes.get() + kHeaderBytes);
    seal_message(message.header, message.bytes.get());
    return message;
}

}  // namespace gradwire
