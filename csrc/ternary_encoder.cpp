#include "ternary_encoder.h"

#include <algorithm>

#include "parallel.h"

namespace gradwire {
namespace {

// Split the list into chunks and choose the coding of each.
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

// Write the directories of all encoders, then their bits without gaps.
MessageBytes join(Header header, const ChunkEncoder* encoders, unsigned count) {
    uint64_t bits = 0;
    uint64_t directory_bytes = 0;
    for (unsigned i = 0; i < count; ++i) {
        bits += encoders[i].bit_count();
        directory_bytes += encoders[i].directory().size();
    }
    header.payload_bytes = directory_bytes + (bits + 7) / 8;
    MessageBytes message = allocate_message(header);
    uint8_t* directory = message.bytes.get() + kHeaderBytes;
    uint8_t* stream = directory + directory_bytes;
    uint64_t at = 0;
    for (unsigned i = 0; i < count; ++i) {
        const std::vector<uint8_t>& own = encoders[i].directory();
        directory = std::copy(own.begin(), own.end(), directory);
        if (encoders[i].bit_count() > 0) append_bits(stream, at, encoders[i].bits(), encoders[i].bit_count());
        at += encoders[i].bit_count();
    }
    seal_message(message);
    return message;
}

}  // namespace

uint64_t TernaryEncoder::least_bytes(const MaskWord* words, uint64_t word_count, uint64_t changed, uint64_t numel) {
    uint64_t bits = 0;
    for (const ChunkSource& chunk : plan_chunks(words, word_count, changed, numel))
        bits += chunk.shape.listed * chunk.shape.rice + chunk.shape.changed + chunk.shape.listed;
    return kHeaderBytes + bits / 8;
}

MessageBytes TernaryEncoder::encode(const MaskWord* words, uint64_t word_count, uint64_t changed, Header header,
                                    unsigned threads) {
    header.kind = Kind::kTernary;
    header.count = changed;
    header.exponent = static_cast<uint8_t>(chunk_exponent(changed));
    const std::vector<ChunkSource> chunks = plan_chunks(words, word_count, changed, header.numel);
    const uint64_t count = chunks.size();
    threads = static_cast<unsigned>(std::clamp<uint64_t>(count / 8, 1, threads));
    if (encoders_.size() < threads) encoders_.resize(threads);
    run_parts(count, threads, [&](unsigned t, uint64_t begin, uint64_t end) {
        encoders_[t].clear();
        for (uint64_t i = begin; i < end; ++i) encoders_[t].encode(chunks[i], i + 1 == count);
    });
    return join(header, encoders_.data(), threads);
}

}  // namespace gradwire
