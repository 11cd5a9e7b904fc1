// The first step of decoding: one block reads the header and the directory of a message and finds the streams of every
// chunk. The message is not trusted: whatever breaks a rule of docs/message-format.md gives a Failure, and no target
// changes.
#pragma once

#include "../common/format.h"
#include "../common/scalars.h"
#include "bits.h"

namespace gradwire::cuda {

// Why a message is refused; failure_text gives the sentence.
enum Failure : uint32_t {
    kSound = 0,
    kBadHeader = 1,
    kBadNumel = 2,
    kTruncated = 3,
    kBadDirectory = 4,
    kBadChecksum = 5,
    kBadStream = 6,
    kBadScale = 7,
};

// A chunk as a decoder sees it; bits are counted from the start of the stream.
struct ChunkEntry {
    uint64_t begin;
    uint64_t unchanged;
    uint64_t quotients;  // their sum from the directory; 0 for the last chunk
    uint64_t bit;
};

// A message whose header is valid.
struct ReadMessage {
    uint32_t failure;
    Kind kind;
    DenseType dtype;
    uint32_t exponent;
    float threshold;
    uint32_t crc;
    uint64_t count;
    uint64_t chunks;
    uint64_t payload_bytes;
    uint64_t directory_bytes;

    GRADWIRE_HD uint64_t changed_in(uint64_t chunk) const {
        const uint64_t left = count - (chunk << exponent);
        return left < uint64_t{1} << exponent ? left : uint64_t{1} << exponent;
    }
    GRADWIRE_HD uint64_t stream_bits() const { return (payload_bytes - directory_bytes) * 8; }
};

GRADWIRE_HD inline uint32_t check_ternary(const uint8_t* bytes, uint16_t threshold, const ReadMessage& message,
                                          uint64_t numel) {
    if (bytes[kFlagsAt] > kFlagShakeUp || bytes[kDtypeAt] != 0) return kBadHeader;
    if (threshold == 0 || threshold >= 0x7f80) return kBadHeader;
    if (message.count > numel || message.exponent != chunk_exponent(message.count)) return kBadHeader;
    if (message.count == 0 && message.payload_bytes > 0) return kBadHeader;
    if (message.count > 8 * message.payload_bytes) return kTruncated;  // a bit for each sign
    return kSound;
}

GRADWIRE_HD inline uint32_t check_dense(const uint8_t* bytes, uint16_t threshold, const ReadMessage& message,
                                        uint64_t numel) {
    if (bytes[kFlagsAt] != 0 || threshold != 0 || message.exponent != 0) return kBadHeader;
    const uint64_t value_bytes = bytes_per_value(message.dtype);
    if (value_bytes == 0 || message.count != numel || message.payload_bytes != numel * value_bytes) return kBadHeader;
    return kSound;
}

// Read and check all fields of the header but the checksum. `numel` is that of the target.
GRADWIRE_HD inline ReadMessage read_header(const ByteSource& source, uint64_t numel) {
    ReadMessage message{};
    message.failure = kTruncated;
    if (source.size < kHeaderBytes) return message;
    uint8_t bytes[kHeaderBytes];
    for (unsigned i = 0; i < kHeaderBytes; ++i) bytes[i] = source.bytes[i];
    const auto threshold = get_field<uint16_t>(bytes + kThresholdAt);
    message.kind = static_cast<Kind>(bytes[kKindAt]);
    message.dtype = static_cast<DenseType>(bytes[kDtypeAt]);
    message.exponent = bytes[kExponentAt];
    message.threshold = bfloat16_to_float(threshold);
    message.crc = get_field<uint32_t>(bytes + kCrcAt);
    message.count = get_field<uint64_t>(bytes + kCountAt);
    message.payload_bytes = get_field<uint64_t>(bytes + kPayloadBytesAt);
    message.failure = kBadHeader;
    if (get_field<uint32_t>(bytes) != kMagic || bytes[kVersionAt] != kVersion || bytes[kReservedAt] != 0)
        return message;
    const auto own_numel = get_field<uint64_t>(bytes + kNumelAt);
    if (own_numel > kMaxNumel) return message;
    message.failure = kBadNumel;
    if (own_numel != numel) return message;
    message.failure = kTruncated;
    if (message.payload_bytes > source.size - kHeaderBytes) return message;
    message.failure = message.kind == Kind::kTernary ? check_ternary(bytes, threshold, message, numel)
                      : message.kind == Kind::kDense ? check_dense(bytes, threshold, message, numel)
                                                     : uint32_t{kBadHeader};
    if (message.failure == kSound && message.kind == Kind::kTernary)
        message.chunks = (message.count + (uint64_t{1} << message.exponent) - 1) >> message.exponent;
    return message;
}

struct Varint {
    uint64_t value;
    bool valid;
};
// Read the number that ends with byte `at`.
GRADWIRE_HD inline Varint varint_ending_at(const uint8_t* bytes, uint64_t at) {
    uint64_t value = bytes[at];
    unsigned length = 1;
    for (; length <= at && bytes[at - length] >= 0x80; ++length) {
        if (length == kMaxVarintBytes) return {0, false};
        value = value << 7 | (bytes[at - length] & 0x7fU);
    }
    return {value, length == 1 || bytes[at] != 0};
}

// Whether a number is a U or a Q depends on all numbers before it, which makes the directory sequential. But each byte
// is a function on two states, "U comes next" and "Q comes next": bit s of the function is the next state after state
// s. Composition of functions is associative, so a scan finds the state at every byte.
inline constexpr uint64_t kStays = 0b10;
struct Compose {
    GRADWIRE_HD uint64_t operator()(uint64_t first, uint64_t second) const {
        return (second >> (first & 1) & 1) | (second >> (first >> 1 & 1) & 1) << 1;
    }
};

GRADWIRE_HD inline bool has_quotients(uint64_t per_chunk, uint64_t unchanged) {
    return unchanged <= kMaxNumel && chunk_shape(per_chunk, unchanged).rice > 0;
}

struct DirectoryShared {
    uint64_t bytes;  // of the directory, once its end is found
    uint32_t failure;
};

// Fill entries[chunk].unchanged and .quotients of all chunks but the last; return the size of the directory.
template <class Team>
GRADWIRE_TEAM uint64_t read_directory(Team& team, const uint8_t* payload, const ReadMessage& message,
                                      ChunkEntry* entries, DirectoryShared& shared) {
    const uint64_t wanted = message.chunks - 1;
    const uint64_t per_chunk = uint64_t{1} << message.exponent;
    uint64_t state = 0, chunk = 0;
    team.each([&](unsigned thread) {
        if (thread == 0) shared = {UINT64_MAX, kSound};
    });
    for (uint64_t base = 0; base < message.payload_bytes && chunk < wanted + (state == 1); base += Team::kThreads) {
        Local<Team, uint64_t> steps, begins;
        team.each([&](unsigned thread) {
            const uint64_t at = base + thread;
            steps[thread] = kStays;
            if (at >= message.payload_bytes || payload[at] >= 0x80) return;
            const bool more = has_quotients(per_chunk, varint_ending_at(payload, at).value);
            steps[thread] = more ? 0b01 : 0b00;
        });
        const uint64_t all = team.exclusive_scan(steps, kStays, Compose{});
        team.each([&](unsigned thread) {
            const uint64_t at = base + thread;
            const bool ends = at < message.payload_bytes && payload[at] < 0x80;
            steps[thread] = steps[thread] >> state & 1;  // from here on the state at this byte
            begins[thread] = ends && steps[thread] == 0;
        });
        const uint64_t begun = exclusive_sum(team, begins);
        team.each([&](unsigned thread) {
            const uint64_t at = base + thread;
            if (at >= message.payload_bytes || payload[at] >= 0x80) return;
            const uint64_t begun_before = chunk + begins[thread];
            const bool is_quotients = steps[thread] == 1;
            if (begun_before >= wanted + is_quotients) return;  // already in the stream
            const Varint number = varint_ending_at(payload, at);
            if (!number.valid) note_failure(&shared.failure, kBadDirectory);
            const uint64_t index = begun_before - is_quotients;
            if (is_quotients) {
                entries[index].quotients = number.value;
            } else {
                entries[index].unchanged = number.value;
                if (number.value > kMaxNumel) note_failure(&shared.failure, kBadDirectory);
            }
            if (index + 1 == wanted && (is_quotients || !has_quotients(per_chunk, number.value))) shared.bytes = at + 1;
        });
        chunk += begun;
        state = all >> state & 1;
    }
    const uint64_t bytes = shared.failure == kSound ? shared.bytes : UINT64_MAX;
    team.each([](unsigned) {});
    return bytes;
}

// Place the chunks one after the other, in elements and in bits; return whether they fit.
template <class Team>
GRADWIRE_TEAM bool place_chunks(Team& team, const ReadMessage& message, uint64_t numel, ChunkEntry* entries,
                                DirectoryShared& shared) {
    team.each([&](unsigned thread) {
        if (thread == 0) shared.failure = kSound;
    });
    uint64_t begin = 0, bit = 0;
    for (uint64_t base = 0; base < message.chunks; base += Team::kThreads) {
        Local<Team, uint64_t> spans, bits;
        team.each([&](unsigned thread) {
            const uint64_t index = base + thread;
            spans[thread] = index + 1 < message.chunks ? message.changed_in(index) + entries[index].unchanged : 0;
        });
        const uint64_t all_spans = team.exclusive_scan(spans, uint64_t{0}, BoundedSum{});
        team.each([&](unsigned thread) {
            const uint64_t index = base + thread;
            bits[thread] = 0;
            if (index >= message.chunks) return;
            const uint64_t changed = message.changed_in(index);
            const uint64_t first = begin + spans[thread];
            const bool last = index + 1 == message.chunks;
            if (first > numel || changed > numel - first ||
                (!last && entries[index].unchanged > numel - first - changed))
                return note_failure(&shared.failure, kBadDirectory);
            if (last) entries[index].unchanged = numel - first - changed;
            entries[index].begin = first;
            const ChunkShape shape = chunk_shape(changed, entries[index].unchanged);
            if (last)
                entries[index].quotients = 0;
            else if (shape.rice == 0)
                entries[index].quotients = shape.listed == 0 ? 0 : shape.span - shape.listed;
            bits[thread] = shape.listed * shape.rice + changed + shape.listed + entries[index].quotients;
        });
        const uint64_t all_bits = team.exclusive_scan(bits, uint64_t{0}, BoundedSum{});
        team.each([&](unsigned thread) {
            if (base + thread < message.chunks) entries[base + thread].bit = bit + bits[thread];
        });
        begin = BoundedSum{}(begin, all_spans);
        bit = BoundedSum{}(bit, all_bits);
    }
    const bool sound = shared.failure == kSound && bit <= message.stream_bits();
    team.each([](unsigned) {});
    return sound;
}

// Return the amount that is added to or subtracted from every changed element.
GRADWIRE_HD inline float quantum_of(const ReadMessage& message, double scale) {
    return static_cast<float>(scale * static_cast<double>(message.threshold));
}

// A team is a block, one for each message. Write `*to` and the message's chunks.
template <class Team>
GRADWIRE_TEAM void read_message(Team& team, const ByteSource& source, uint64_t numel, double scale, ReadMessage* to,
                                ChunkEntry* entries, DirectoryShared& shared) {
    ReadMessage message = read_header(source, numel);
    if (message.failure == kSound && !is_finite(quantum_of(message, scale))) message.failure = kBadScale;
    if (message.failure == kSound && message.chunks > 0) {
        if (message.chunks > 1)
            message.directory_bytes = read_directory(team, source.bytes + kHeaderBytes, message, entries, shared);
        if (message.directory_bytes > message.payload_bytes || !place_chunks(team, message, numel, entries, shared)) {
            message.directory_bytes = 0;
            message.failure = kBadDirectory;
        }
    }
    team.each([&](unsigned thread) {
        if (thread == 0) *to = message;
    });
}

}  // namespace gradwire::cuda
