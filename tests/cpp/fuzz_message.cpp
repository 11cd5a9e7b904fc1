// libFuzzer target on the parser and the decoders. Every input is tried three times: unchanged, with a correct
// checksum, and with a plausible header as well, so that the payload is reached.
//
//   cmake --preset fuzz && cmake --build --preset fuzz
//   mkdir corpus && cp tests/golden/*/*.bin corpus && build/fuzz/tests/cpp/fuzz_message -max_len=4096 corpus
#include <algorithm>
#include <cstdlib>

#include "decoder.h"
#include "support.h"

using namespace gradwire;
using namespace support;

namespace {

constexpr uint64_t kLargestTarget = uint64_t{1} << 16;

void require(bool condition) {
    if (!condition) std::abort();
}

// Check a valid message: every table and the plain encoder write the same bytes.
void check_valid(const Bytes& bytes, const MessageView& message, uint64_t cut) {
    const Header& header = message.header;
    const bool fits = header.numel <= kLargestTarget;
    if (header.kind == Kind::kTernary) {
        const Entries entries = list(message);
        require(encode(entries, header) == bytes);
        if (fits) require(encode_plainly(entries, header) == bytes);
        require(bytes.size() <= max_ternary_bytes(header.numel));
    }
    if (!fits) return;
    std::vector<float> target(header.numel);
    const uint64_t first = std::min(cut, header.numel);
    const std::vector<Array> halves{{target.data(), first, Dtype::kFloat32},
                                    {target.data() + first, header.numel - first, Dtype::kFloat32}};
    std::vector<double> whole(header.numel);
    apply_messages({message}, halves, 1.0);
    apply_messages({message, message}, {{whole.data(), header.numel, Dtype::kFloat64}}, 0.5);
    if (header.kind == Kind::kDense) return;
    for (uint64_t i = 0; i < header.numel; ++i) require(static_cast<double>(target[i]) == whole[i]);
}

class Sink {
  public:
    explicit Sink(uint64_t numel) : target_(numel) {}
    void set_window(uint64_t first, uint64_t stop) {
        first_ = first;
        stop_ = stop;
    }
    uint64_t capacity() const { return kCapacity; }
    Entry* entries() { return entries_.data(); }
    void add_entries(uint64_t found) {
        require(found <= kCapacity);
        kernels().float32.add_entries(entries_.data(), found, target_.data() + first_, stop_ - first_, 1,
                                      found % 2 == 0);
    }
    uint64_t add_bitmap(const BitRun& changed, const BitRun& minus, uint64_t first, uint64_t numel) {
        require(first >= first_ && first <= stop_ && numel <= stop_ - first);
        return kernels().float32.add_bitmap(changed, minus, target_.data() + first, numel, 1);
    }

  private:
    static constexpr uint64_t kCapacity = 16;
    std::vector<float> target_;
    std::vector<Entry> entries_ = std::vector<Entry>(kCapacity + kPrefetchAhead);
    uint64_t first_ = 0;
    uint64_t stop_ = 0;
};

void decode_blindly(const MessageView& message, uint64_t cut) {
    const uint64_t numel = message.header.numel;
    if (message.header.kind == Kind::kDense || numel > kLargestTarget) return;
    const uint64_t window = std::max<uint64_t>(1, std::max(cut * 8, numel / 64));
    try {
        Decoder decoder(message);
        Sink sink(numel);
        for (uint64_t first = 0; first < numel; first += window) {
            const uint64_t stop = std::min(first + window, numel);
            sink.set_window(first, stop);
            decoder.advance(first, stop, sink);
        }
    } catch (const MessageError&) {
    }
}

// Make the header plausible, so that decoding reaches the payload.
void mend_header(Bytes& bytes) {
    const uint8_t first[8] = {'G', 'R', 'D', 'W', 1, 1, static_cast<uint8_t>(bytes[6] & 1), 0};
    std::copy(first, first + 8, bytes.begin());
    bytes[10] = bytes[11] = 0;
    uint64_t numel, count;
    std::memcpy(&numel, &bytes[24], 8);
    std::memcpy(&count, &bytes[32], 8);
    const uint64_t payload_bytes = bytes.size() - kHeaderBytes;
    numel %= kLargestTarget + 1;
    count = payload_bytes == 0 ? 0 : std::min(numel, count % (8 * payload_bytes + 1));
    bytes[7] = static_cast<uint8_t>(chunk_exponent(count));
    std::memcpy(&bytes[24], &numel, 8);
    std::memcpy(&bytes[32], &count, 8);
    std::memcpy(&bytes[40], &payload_bytes, 8);
    uint16_t threshold;
    std::memcpy(&threshold, &bytes[8], 2);
    if (threshold == 0 || threshold >= 0x7f80) threshold = 0x3f00;
    std::memcpy(&bytes[8], &threshold, 2);
}

void check_bytes(const Bytes& bytes, uint64_t cut) {
    MessageView message;
    try {
        message = read_message(bytes.data(), bytes.size());
    } catch (const MessageError&) {
        return;
    }
    decode_blindly(message, cut);
    try {
        validate(message);
    } catch (const MessageError&) {
        return;
    }
    check_valid(exactly(bytes.data(), message.nbytes()), message, cut);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    Bytes raw(data, data + size);
    for_every_table([&] { check_bytes(raw, size % 64); });
    if (size < kHeaderBytes) return 0;
    Bytes mended = raw;
    mend_checksum(mended);
    for_every_table([&] { check_bytes(mended, size % 64); });
    mend_header(mended);
    mend_checksum(mended);
    for_every_table([&] { check_bytes(mended, size % 64); });
    return 0;
}
