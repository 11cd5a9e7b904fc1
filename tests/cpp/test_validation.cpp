// Only canonical messages are accepted, and no change of their bytes leads to an access out of bounds.
#include <functional>

#include "decoder.h"
#include "mutations.h"

using namespace gradwire;
using namespace support;

namespace {

// Check that mutated bytes are refused or are the one spelling of another message.
void check_refused_or_canonical(const Bytes& bytes) {
    MessageView message;
    try {
        message = parse(bytes);
    } catch (const MessageError&) {
        return;
    }
    if (message.header.kind == Kind::kTernary) CHECK(encode_plainly(list(message), message.header) == bytes);
}

// A sink that stays inside its target, as that of apply_messages, and calls `meanwhile` between the steps.
class Sink {
  public:
    Sink(uint64_t numel, std::function<void()> meanwhile) : target_(numel), meanwhile_(std::move(meanwhile)) {
        target_.shrink_to_fit();
    }
    void set_window(uint64_t first, uint64_t stop) {
        first_ = first;
        stop_ = stop;
    }
    uint64_t capacity() const { return kCapacity; }
    Entry* entries() {
        meanwhile_();
        return entries_.data();
    }
    void add_entries(uint64_t found) {
        CHECK(found <= kCapacity);
        for (const bool scattered : {false, true})
            kernels().float32.add_entries(entries_.data(), found, target_.data() + first_, stop_ - first_, 1,
                                          scattered);
        meanwhile_();
    }
    uint64_t add_bitmap(const BitRun& changed, const BitRun& minus, uint64_t first, uint64_t numel) {
        CHECK(first >= first_ && first <= stop_ && numel <= stop_ - first);
        meanwhile_();
        return kernels().float32.add_bitmap(changed, minus, target_.data() + first, numel, 1);
    }

  private:
    static constexpr uint64_t kCapacity = 64;
    std::vector<float> target_;
    std::function<void()> meanwhile_;
    std::vector<Entry> entries_ = std::vector<Entry>(kCapacity + kPrefetchAhead);
    uint64_t first_ = 0;
    uint64_t stop_ = 0;
};

// Decode without validation: end normally or by MessageError, without any access out of bounds.
void decode_blindly(const MessageView& message, uint64_t window, const std::function<void()>& meanwhile) {
    const uint64_t numel = message.header.numel;
    try {
        Decoder decoder(message);
        Sink sink(numel, meanwhile);
        for (uint64_t first = 0; first < numel; first += window) {
            const uint64_t stop = std::min(first + window, numel);
            sink.set_window(first, stop);
            decoder.advance(first, stop, sink);
        }
    } catch (const MessageError&) {
    }
}

}  // namespace

CASE(zeros_behind_the_quotients_of_a_chunk_are_refused) {
    for_every_table([] {
        Random random(30);
        for (const double density : {0.01, 0.2, 0.8}) {
            const Entries entries = patterns::at_density(3000 + static_cast<uint64_t>(600 / density), density, random);
            const Header header = header_for(entries.numel);
            CHECK(list(parse(encode_plainly(entries, header))) == entries);
            for (const unsigned zeros : {1U, 2U, 7U, 8U, 57U, 64U})
                CHECK_THROWS(MessageError, parse(encode_plainly(entries, header, zeros)));
        }
    });
}

CASE(the_checksum_is_crc_32c_at_any_length) {
    Random random(5);
    for_every_table([&] {
        for (const uint64_t size : Numbers{0, 1, 7, 8, 9, 4096, 12287, 12288, 12289, 24576, 40003}) {
            const check::Note note("size", size);
            Bytes bytes(size);
            for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random.next());
            CHECK_EQUAL(~kernels().crc32c(~uint32_t{0}, bytes.data(), size), crc32c_plainly(bytes));
        }
    });
}

CASE(any_changed_bit_breaks_the_checksum) {
    for_every_table([] {
        for (const Bytes& sample : samples()) {
            if (sample.size() > 120) continue;
            for (uint64_t bit = 0; bit < 8 * sample.size(); ++bit) {
                const check::Note note("bit", bit);
                Bytes bytes = sample;
                flip_bit(bytes, bit);
                CHECK_THROWS(MessageError, parse(bytes));
            }
        }
    });
}

CASE(a_changed_bit_with_a_mended_checksum_is_refused_or_another_message) {
    for_every_table([] {
        Random random(32);
        for (const Bytes& sample : samples()) {
            const uint64_t stride = sample.size() > 120 ? 41 : 1;
            for (uint64_t bit = random.below(stride); bit < 8 * sample.size(); bit += stride) {
                const check::Note note("bit", bit);
                Bytes bytes = sample;
                flip_bit(bytes, bit);
                mend_checksum(bytes);
                check_refused_or_canonical(bytes);
            }
        }
    });
}

CASE(scrambled_messages_with_a_mended_checksum_are_refused_or_other_messages) {
    for_every_table([] {
        Random random(33);
        for (const Bytes& sample : samples())
            for (unsigned i = 0; i < 40; ++i) {
                Bytes bytes = sample;
                scramble(bytes, random);
                mend_checksum(bytes);
                check_refused_or_canonical(bytes);
            }
    });
}

CASE(a_message_cut_anywhere_is_refused) {
    for_every_table([] {
        for (const Bytes& sample : samples())
            for (uint64_t size = 0; size < sample.size(); size += size < 60 ? 1 : 29) {
                const check::Note note("size", size);
                CHECK_THROWS(MessageError, parse(exactly(sample.data(), size)));
                if (size < kHeaderBytes) continue;
                // The same with a header that agrees.
                Bytes bytes = exactly(sample.data(), size);
                const uint64_t payload_bytes = size - kHeaderBytes;
                std::memcpy(bytes.data() + 40, &payload_bytes, 8);
                mend_checksum(bytes);
                check_refused_or_canonical(bytes);
            }
    });
}

CASE(decoders_stay_in_bounds_on_bytes_that_were_not_validated) {
    for_every_table([] {
        Random random(34);
        for (const Bytes& sample : samples())
            for (unsigned i = 0; i < 40; ++i) {
                const check::Note note("round", i);
                Bytes bytes = sample;
                const MessageView message = parse(bytes);
                scramble(bytes, random);
                decode_blindly(message, i % 2 == 0 ? message.header.numel : 1 + random.below(400), [] {});
            }
    });
}

CASE(decoders_stay_in_bounds_on_bytes_that_change_meanwhile) {
    for_every_table([] {
        Random random(35);
        for (const Bytes& sample : samples())
            for (unsigned i = 0; i < 20; ++i) {
                const check::Note note("round", i);
                Bytes bytes = sample;
                const MessageView message = parse(bytes);
                decode_blindly(message, i % 2 == 0 ? message.header.numel : 1 + random.below(400), [&] {
                    if (random.chance(0.3)) scramble(bytes, random);
                });
            }
    });
}

CASE(listing_stays_in_bounds_on_kernels_alone) {
    for_every_table([] {
        Random random(36);
        for (const Bytes& sample : samples()) {
            Bytes bytes = sample;
            const MessageView message = parse(bytes);
            ChunkReader reader(message);
            Chunk chunk;
            std::vector<Chunk> chunks;
            while (reader.next(chunk)) chunks.push_back(chunk);
            for (unsigned i = 0; i < 20; ++i) {
                scramble(bytes, random);
                for (const Chunk& stale : chunks) {
                    kernels().sum_chunk(reader.stream(), reader.stream_bytes(), stale);
                    const uint64_t capacity = 1 + random.below(40);
                    std::vector<Entry> out(capacity);
                    ChunkCursor cursor;
                    cursor.chunk = stale;
                    for (unsigned calls = 0; !cursor.done; ++calls) {
                        const uint64_t found = kernels().list_entries(reader.stream(), reader.stream_bytes(), cursor, 0,
                                                                      message.header.numel, out.data(), capacity);
                        CHECK(found <= capacity);
                        if (found < capacity) break;
                        CHECK(calls < 2000);
                    }
                }
            }
        }
    });
}

CASE(listing_a_message_that_changed_is_refused_or_in_bounds) {
    for_every_table([] {
        Random random(37);
        for (const Bytes& sample : samples())
            for (unsigned i = 0; i < 10; ++i) {
                Bytes bytes = sample;
                const MessageView message = parse(bytes);
                scramble(bytes, random);
                try {
                    const Entries entries = list(message);
                    for (const uint64_t position : entries.positions) CHECK(position < message.header.numel);
                } catch (const MessageError&) {
                }
            }
    });
}

CASE(an_unknown_instruction_set_is_named_in_the_error) {
    try {
        select_isa("vax");
        CHECK(false);
    } catch (const BackendUnavailable& error) {
        CHECK(std::string(error.what()).find("vax") != std::string::npos);
        CHECK(std::string(error.what()).find("scalar") != std::string::npos);
    }
}
