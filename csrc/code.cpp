// Pass 2: from the list of mask words to the bytes of a message.
#include <algorithm>
#include <cstring>
#include <new>

#include "codec.h"
#include "parallel.h"

namespace gradwire {
namespace {

// Splits the list into chunks: where each begins and how it will be coded.
std::vector<ChunkSource> plan_chunks(const MaskWord* words, uint64_t word_count, uint64_t changed, uint64_t numel) {
    const uint64_t per_chunk = uint64_t{1} << chunk_exponent(changed);
    const auto skip_changed = kernels().skip_changed;
    std::vector<ChunkSource> chunks;
    chunks.reserve((changed + per_chunk - 1) / per_chunk);
    ListPlace place{words, 0};
    uint64_t begin = 0;
    for (uint64_t left = changed; left > 0;) {
        const uint64_t own = std::min(left, per_chunk);
        const ListPlace first = place;
        const uint64_t reached = skip_changed(place, own);
        left -= own;
        const uint64_t end = left > 0 ? reached : numel;
        chunks.push_back({first, words + word_count, begin, chunk_shape(own, end - begin - own)});
        begin = end;
    }
    return chunks;
}

MessageBytes allocate_message(const Header& header) {
    MessageBytes message;
    message.header = header;
    message.size = kHeaderBytes + header.payload_bytes;
    message.bytes.reset(static_cast<uint8_t*>(std::malloc(message.size + 16)));  // append_bits writes whole words
    if (!message.bytes) throw std::bad_alloc();
    return message;
}

// The coders' directories, then their bits without any gap.
MessageBytes join(Header header, const ChunkCoder* coders, unsigned count) {
    uint64_t bits = 0;
    uint64_t directory_bytes = 0;
    for (unsigned i = 0; i < count; ++i) {
        bits += coders[i].bit_count();
        directory_bytes += coders[i].directory().size();
    }
    header.payload_bytes = directory_bytes + (bits + 7) / 8;
    MessageBytes message = allocate_message(header);
    uint8_t* directory = message.bytes.get() + kHeaderBytes;
    uint8_t* stream = directory + directory_bytes;
    uint64_t at = 0;
    for (unsigned i = 0; i < count; ++i) {
        const std::vector<uint8_t>& own = coders[i].directory();
        directory = std::copy(own.begin(), own.end(), directory);
        if (coders[i].bit_count() > 0) append_bits(stream, at, coders[i].bits(), coders[i].bit_count());
        at += coders[i].bit_count();
    }
    seal_message(message.header, message.bytes.get());
    return message;
}

}  // namespace

MessageBytes code_ternary(const MaskWord* words, uint64_t word_count, uint64_t changed, Header header,
                          std::vector<ChunkCoder>& coders, unsigned threads) {
    header.kind = Kind::kTernary;
    header.count = changed;
    header.exponent = static_cast<uint8_t>(chunk_exponent(changed));
    const std::vector<ChunkSource> chunks = plan_chunks(words, word_count, changed, header.numel);
    const uint64_t count = chunks.size();
    threads = static_cast<unsigned>(std::clamp<uint64_t>(count / 8, 1, threads));
    if (coders.size() < threads) coders.resize(threads);
    run_parts(count, threads, [&](unsigned t, uint64_t begin, uint64_t end) {
        coders[t].clear();
        for (uint64_t i = begin; i < end; ++i) coders[t].code(chunks[i], i + 1 == count);
    });
    return join(header, coders.data(), threads);
}

namespace {

// Rounds to nearest-even, but a finite value never to infinity: the message must stay as finite as its source.
template <class Value>
uint16_t to_bfloat16(Value value) {
    constexpr float kMost = 3.3895313892515355e38F;
    const bool finite = value - value == Value{0};
    if (finite && value > Value{kMost}) value = Value{kMost};
    if (finite && value < Value{-kMost}) value = Value{-kMost};
    return float_to_bfloat16(static_cast<float>(value));
}

template <class Value, class Convert>
void put_values(const ConstArray& values, uint8_t* out, Convert convert) {
    const auto* from = static_cast<const Value*>(values.data);
    for (uint64_t i = 0; i < values.numel; ++i) {
        const auto value = convert(from[i]);
        std::memcpy(out + i * sizeof value, &value, sizeof value);
    }
}

template <class Value>
void put_values(const ConstArray& values, DenseType dtype, uint8_t* out) {
    switch (dtype) {
        case DenseType::kFloat32: return put_values<Value>(values, out, [](Value v) { return static_cast<float>(v); });
        case DenseType::kFloat64: return put_values<Value>(values, out, [](Value v) { return static_cast<double>(v); });
        case DenseType::kBfloat16: return put_values<Value>(values, out, [](Value v) { return to_bfloat16(v); });
        case DenseType::kNone: break;
    }
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
    uint8_t* payload = message.bytes.get() + kHeaderBytes;
    if (values.dtype == Dtype::kFloat64)
        put_values<double>(values, dtype, payload);
    else
        put_values<float>(values, dtype, payload);
    seal_message(message.header, message.bytes.get());
    return message;
}

void decode_dense(const MessageView& message, void* out) {
    if (message.header.numel == 0) return;  // and `out` may be null
    if (message.header.dtype != DenseType::kBfloat16) {
        std::memcpy(out, message.payload, message.header.payload_bytes);
        return;
    }
    auto* values = static_cast<float*>(out);
    for (uint64_t i = 0; i < message.header.numel; ++i) {
        uint16_t bits;
        std::memcpy(&bits, message.payload + 2 * i, sizeof bits);
        values[i] = bfloat16_to_float(bits);
    }
}

}  // namespace gradwire
