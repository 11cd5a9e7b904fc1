#include "message.h"

#include <cstring>
#include <string>
#include <type_traits>

#include "common/error.h"
#include "common/scalars.h"
#include "cpu/kernels.h"

namespace gradwire {
namespace {

template <class Part>
std::string text_of(const Part& part) {
    if constexpr (std::is_arithmetic_v<Part>)
        return std::to_string(part);
    else
        return part;
}

// Throw MessageError with the parts as its text.
template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
    throw MessageError((... + text_of(parts)));
}

// Read all fields; nothing is checked.
Header get_header(const uint8_t* bytes) {
    Header header;
    header.kind = static_cast<Kind>(bytes[kKindAt]);
    header.flags = bytes[kFlagsAt];
    header.exponent = bytes[kExponentAt];
    header.dtype = static_cast<DenseType>(bytes[kDtypeAt]);
    header.threshold = get_field<uint16_t>(bytes + kThresholdAt);
    header.key = get_field<uint32_t>(bytes + kKeyAt);
    header.step = get_field<uint32_t>(bytes + kStepAt);
    header.crc = get_field<uint32_t>(bytes + kCrcAt);
    header.numel = get_field<uint64_t>(bytes + kNumelAt);
    header.count = get_field<uint64_t>(bytes + kCountAt);
    header.payload_bytes = get_field<uint64_t>(bytes + kPayloadBytesAt);
    return header;
}

void check_ternary(const Header& h) {
    if (h.flags > kFlagShakeUp) fail("flags are ", +h.flags, ", must be 0 or 1: this version has no other flag");
    if (h.threshold == 0 || h.threshold >= 0x7f80)
        fail("threshold has the bfloat16 bits ", h.threshold, ", must be positive, finite and not zero");
    if (h.dtype != DenseType::kNone) fail("dtype is ", unsigned(h.dtype), ", must be 0 in a ternary message");
    if (h.count > h.numel) fail("count is ", h.count, ", must be at most numel, ", h.numel);
    if (h.exponent != chunk_exponent(h.count))
        fail("chunk-size exponent is ", +h.exponent, ", must be ", chunk_exponent(h.count), " for count ", h.count);
    if (h.count == 0 && h.payload_bytes > 0)
        fail("payload_bytes is ", h.payload_bytes, ", must be 0 where nothing changed");
}

void check_dense(const Header& h) {
    const uint64_t bytes = bytes_per_value(h.dtype);
    if (bytes == 0) fail("dtype is ", unsigned(h.dtype), ", must be 1, 2 or 3 in a dense message");
    if (h.flags != 0 || h.threshold != 0 || h.exponent != 0)
        fail("flags ", +h.flags, ", threshold ", h.threshold, " and exponent ", +h.exponent,
             " must be 0 in a dense message");
    if (h.count != h.numel) fail("count is ", h.count, ", must be numel, ", h.numel, ", in a dense message");
    if (h.payload_bytes != h.numel * bytes)
        fail("payload_bytes is ", h.payload_bytes, ", must be ", h.numel * bytes, " for ", h.numel, " values");
}

void check_chunk(const Chunk& chunk, const uint8_t* stream, uint64_t stream_bytes) {
    const ChunkShape& shape = chunk.shape;
    const StreamSums sums = kernels().sum_chunk(stream, stream_bytes, chunk);
    const auto wrong = [&](const auto&... what) { fail("chunk at element ", chunk.begin, ": ", what...); };
    if (sums.ones != shape.listed) wrong("its quotients hold ", sums.ones, " ones, must be ", shape.listed);
    const uint64_t unused_bits = chunk.quotient_bits - sums.used_bits;
    if (!chunk.last && unused_bits > 0) wrong("its quotients do not end with a one");
    if (unused_bits >= 8) wrong(unused_bits, " bits of padding, must be fewer than 8");
    const uint64_t quotients = sums.used_bits - shape.listed;
    const uint64_t unlisted = shape.span - shape.listed;
    const bool beyond = quotients > unlisted >> shape.rice || (quotients << shape.rice) + sums.remainders > unlisted;
    if (beyond) wrong("its distances lead beyond its span of ", shape.span);
    const uint64_t reached = (quotients << shape.rice) + sums.remainders + shape.listed;
    if (!chunk.last && shape.listed > 0 && (reached == shape.span) == shape.inverted)
        wrong("its distances reach ", reached, " of its span of ", shape.span, ": its last element is not changed");
}

uint32_t message_crc(const uint8_t* header, const uint8_t* payload, uint64_t payload_bytes) {
    uint8_t copy[kHeaderBytes];
    std::memcpy(copy, header, kHeaderBytes);
    put_field(copy + kCrcAt, uint32_t{0});
    const auto crc32c = kernels().crc32c;
    return ~crc32c(crc32c(~uint32_t{0}, copy, kHeaderBytes), payload, payload_bytes);
}

}  // namespace

float MessageView::threshold() const { return bfloat16_to_float(header.threshold); }

ChunkReader::ChunkReader(const MessageView& message)
    : payload_(message.payload),
      payload_bytes_(message.header.payload_bytes),
      numel_(message.header.numel),
      per_chunk_(uint64_t{1} << message.header.exponent),
      changed_left_(message.header.count) {
    const uint64_t directory_bytes = find_stream();
    stream_ = payload_ + directory_bytes;
    stream_bytes_ = payload_bytes_ - directory_bytes;
    begin_ = cursor_ = bit_ = 0;
    changed_left_ = message.header.count;
}

// Return the size of the directory, by walking it: the streams begin at its end.
uint64_t ChunkReader::find_stream() {
    stream_bytes_ = payload_bytes_;  // an upper bound until the directory's size is known
    Chunk chunk;
    while (changed_left_ > per_chunk_) next(chunk);
    return cursor_;
}

uint64_t ChunkReader::read_varint() {
    uint64_t value = 0;
    for (unsigned i = 0; i < kMaxVarintBytes; ++i) {
        if (cursor_ == payload_bytes_) fail("the directory runs beyond the payload of ", payload_bytes_, " bytes");
        const uint8_t byte = payload_[cursor_++];
        value |= uint64_t{byte & 0x7fU} << (7 * i);
        if (byte >= 0x80) continue;
        if (byte == 0 && i > 0) fail("a number in the directory has a superfluous zero byte");
        return value;
    }
    fail("a number in the directory is longer than ", kMaxVarintBytes, " bytes");
}

// The last chunk has no entry and takes all remaining elements.
ChunkShape ChunkReader::read_shape(bool last) {
    const uint64_t changed = last ? changed_left_ : per_chunk_;
    const uint64_t left = numel_ - begin_;
    const uint64_t unchanged = !last ? read_varint() : left > changed ? left - changed : 0;
    if (changed > left || unchanged > left - changed)
        fail("chunk at element ", begin_, ": ", changed, " changed and ", unchanged,
             " unchanged elements exceed numel ", numel_);
    return chunk_shape(changed, unchanged);
}

bool ChunkReader::next(Chunk& chunk) {
    if (changed_left_ == 0) return false;
    chunk.last = changed_left_ <= per_chunk_;
    chunk.begin = begin_;
    chunk.shape = read_shape(chunk.last);
    const ChunkShape& shape = chunk.shape;
    const uint64_t left = stream_bytes_ * 8 - bit_;
    const uint64_t known = shape.listed * shape.rice + shape.changed + shape.listed;
    uint64_t quotients = left > known ? left - known : 0;
    if (!chunk.last) quotients = shape.rice > 0 ? read_varint() : shape.listed == 0 ? 0 : shape.span - shape.listed;
    if (known > left || quotients > left - known)
        fail("chunk at element ", begin_, " needs more bits than the ", left, " that are left of its message");
    chunk.remainder_bit = bit_;
    chunk.sign_bit = bit_ + shape.listed * shape.rice;
    chunk.quotient_bit = chunk.sign_bit + shape.changed;
    chunk.quotient_bits = shape.listed + quotients;
    bit_ = chunk.quotient_bit + chunk.quotient_bits;
    begin_ += shape.span;
    changed_left_ -= shape.changed;
    return true;
}

MessageView read_message(const uint8_t* bytes, uint64_t available) {
    if (available < kHeaderBytes) fail("length is ", available, ", must be at least the header's 48 bytes");
    if (get_field<uint32_t>(bytes) != kMagic)
        fail("magic is ", get_field<uint32_t>(bytes), ", not \"GRDW\": not a gradwire message");
    if (bytes[kVersionAt] != kVersion)
        fail("version is ", +bytes[kVersionAt], ", this gradwire reads only 1: upgrade the older of the two sides");
    if (bytes[kReservedAt] != 0) fail("reserved byte is ", +bytes[kReservedAt], ", must be 0");
    const Header header = get_header(bytes);
    if (header.numel > kMaxNumel) fail("numel is ", header.numel, ", must be at most 2^48");
    if (header.kind == Kind::kTernary)
        check_ternary(header);
    else if (header.kind == Kind::kDense)
        check_dense(header);
    else
        fail("kind is ", unsigned(header.kind), ", must be 1 (ternary) or 2 (dense)");
    if (header.payload_bytes > available - kHeaderBytes)
        fail("payload_bytes is ", header.payload_bytes, ", but only ", available - kHeaderBytes,
             " bytes follow the header: the message is truncated");
    return {header, bytes + kHeaderBytes};
}

void validate(const MessageView& message) {
    const uint32_t crc = message_crc(message.payload - kHeaderBytes, message.payload, message.header.payload_bytes);
    if (crc != message.header.crc)
        fail("checksum is ", message.header.crc, ", must be ", crc, ": the message is corrupt");
    validate_payload(message);
}

void validate_payload(const MessageView& message) {
    if (message.header.kind == Kind::kDense) return;
    ChunkReader reader(message);
    Chunk chunk;
    while (reader.next(chunk)) check_chunk(chunk, reader.stream(), reader.stream_bytes());
}

const char* kind_name(const MessageView& message) {
    if (message.header.kind == Kind::kDense) return "dense";
    ChunkReader reader(message);
    Chunk chunk;
    bool bitmap = message.header.count > 0;
    while (bitmap && reader.next(chunk)) bitmap = chunk.shape.rice == 0;
    return bitmap ? "bitmap" : "sparse";
}

MessageBytes allocate_message(const Header& header) {
    MessageBytes message;
    message.header = header;
    message.size = kHeaderBytes + header.payload_bytes;
    message.bytes.reset(static_cast<uint8_t*>(std::malloc(message.size + 16)));
    if (!message.bytes) throw std::bad_alloc();
    return message;
}

void seal_message(MessageBytes& message) {
    uint8_t* bytes = message.bytes.get();
    put_header(bytes, message.header);
    put_field(bytes + kCrcAt, message_crc(bytes, bytes + kHeaderBytes, message.header.payload_bytes));
}

}  // namespace gradwire
