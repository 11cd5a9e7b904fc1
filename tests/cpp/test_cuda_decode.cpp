// The CUDA decoder's algorithms on emulated threads against the CPU's: the verdict on messages, and the targets.
#include "emulated_decoder.h"
#include "golden.h"
#include "mutations.h"

using namespace gradwire;
using namespace support;

namespace {

bool cpu_accepts(const Bytes& bytes) {
    try {
        parse(bytes);
        return true;
    } catch (const MessageError&) {
        return false;
    }
}

uint64_t numel_of(const Bytes& bytes) {
    return bytes.size() < kHeaderBytes ? 0 : get_field<uint64_t>(bytes.data() + kNumelAt);
}

// Whether the tests have memory for the target.
bool is_small(const Bytes& bytes) { return numel_of(bytes) <= uint64_t{1} << 22; }

template <class Target>
std::vector<Target> some_target(uint64_t numel) {
    Random random(numel);
    std::vector<Target> target(numel);
    for (Target& value : target) value = static_cast<Target>(random.uniform() - 0.5);
    target.shrink_to_fit();
    return target;
}

// Apply all messages to a target in several arrays, window by window, each message in order.
template <class Target>
void check_apply(const std::vector<Bytes>& messages, uint64_t numel, uint64_t window, double scale, bool backwards) {
    const check::Note notes[] = {{"numel", numel}, {"window", window}};
    std::vector<MessageView> views;
    std::vector<EmulatedDecoder> decoders;
    for (const Bytes& bytes : messages) {
        views.push_back(parse(bytes));
        decoders.emplace_back(bytes, numel, scale, backwards);
        CHECK_EQUAL(decoders.back().failure(), uint32_t{cuda::kSound});
    }
    std::vector<Target> expected = some_target<Target>(numel), target = expected;
    const Dtype dtype = sizeof(Target) == 8 ? Dtype::kFloat64 : Dtype::kFloat32;
    apply_messages(views, {{expected.data(), numel, dtype}}, scale);

    std::vector<Array> arrays;
    for (uint64_t at = 0; at < numel;) {
        const uint64_t some = std::min(numel - at, numel / 3 + 1);
        arrays.push_back({target.data() + at, some, dtype});
        arrays.push_back({nullptr, 0, dtype});
        at += some;
    }
    for (const cuda::ArrayRange& range : cuda::cut_ranges(arrays, numel, window))
        for (uint64_t begin = range.begin; begin < range.end; begin += window)
            for (EmulatedDecoder& decoder : decoders)
                decoder.apply(range.arrays, begin, std::min(begin + window, range.end));
    CHECK(numel == 0 || std::memcmp(target.data(), expected.data(), numel * sizeof(Target)) == 0);
}

void check_round_trip(const Entries& entries, bool backwards) {
    const std::vector<Bytes> one{encode(entries, header_for(entries.numel))};
    check_apply<float>(one, entries.numel, uint64_t{1} << 30, 1.0, backwards);
    check_apply<double>(one, entries.numel, entries.numel / 5 + 7, -0.3, backwards);
}

Bytes dense_message(uint64_t numel, DenseType type, uint64_t seed) {
    Random random(seed);
    std::vector<double> values(numel);
    for (double& value : values) value = random.uniform() * 3 - 1;
    std::vector<float> narrow(values.begin(), values.end());
    const MessageBytes message = type == DenseType::kFloat64
                                     ? encode_dense({{values.data(), numel, Dtype::kFloat64}}, type, 1, 2)
                                     : encode_dense({{narrow.data(), numel, Dtype::kFloat32}}, type, 1, 2);
    return exactly(message.bytes.get(), message.size);
}

// Check that the emulated decoder's verdict equals the CPU's, and that decoding stays in bounds.
void check_verdict(const Bytes& bytes) {
    EmulatedDecoder decoder(bytes, numel_of(bytes), 1.0, false);
    const bool accepted = decoder.failure() == cuda::kSound;
    CHECK_EQUAL(accepted, cpu_accepts(bytes));
    if (decoder.message.failure != cuda::kSound) return;
    const uint64_t numel = numel_of(bytes);
    std::vector<float> target(numel);
    target.shrink_to_fit();
    for (const cuda::ArrayRange& range :
         cuda::cut_ranges(std::vector<Array>{{target.data(), numel, Dtype::kFloat32}}, numel, numel + 1))
        decoder.apply(range.arrays, range.begin, range.end);
}

}  // namespace

CASE(every_pattern_is_applied_as_the_cpu_does) {
    for (const bool backwards : {false, true})
        for (const uint64_t numel : Numbers{0, 1, 2, 63, 64, 65, 700, 4097, 50021}) {
            Random random(numel + 1);
            patterns::for_every_pattern(numel, random, [&](const Entries& e) { check_round_trip(e, backwards); });
        }
}

CASE(counts_around_multiples_of_the_chunk_size_are_applied_as_the_cpu_does) {
    for (const uint64_t changed : Numbers{255, 256, 257, 512, 513, 4097, 16385, 70000})
        for (const uint64_t farthest : Numbers{0, 1, 3, 20, 300}) {
            const check::Note notes[] = {{"changed", changed}, {"farthest", farthest}};
            Random random(changed + farthest);
            check_round_trip(patterns::with_count(changed, farthest, farthest * 3, random), changed % 2 == 0);
        }
}

CASE(a_directory_longer_than_a_round_is_read) {
    Random random(2);
    // e = 8 and 9: chunks of every polarity, so that some entries have a Q and some have none.
    const Entries entries = patterns::choose(60000, random, [&](uint64_t i) {
        return random.chance(i / 700 % 3 == 0 ? 0.9 : i / 700 % 3 == 1 ? 0.4 : 0.02);
    });
    for (const bool backwards : {false, true}) check_round_trip(entries, backwards);
    const Entries many = patterns::at_density(uint64_t{1} << 21, 0.5, random);
    CHECK(encode(many, header_for(many.numel)).size() > 1000);
    check_round_trip(many, false);
}

CASE(chunks_of_many_rounds_are_applied_as_the_cpu_does) {
    for (const double density : {0.1, 0.25, 0.8}) {
        Random random(13);
        const Entries entries = patterns::at_density(uint64_t{1} << 22, density, random);
        CHECK(chunk_exponent(entries.positions.size()) >= 11);
        check_apply<float>({encode(entries, header_for(entries.numel))}, entries.numel, uint64_t{1} << 20, 1.0, false);
    }
    // Long quotients: chunks of neighbours, each followed by one far away, so that k is small for most.
    Random random(14);
    Entries uneven;
    uint64_t next = 0;
    for (uint64_t i = 0; i < 600000; ++i) {
        if (i % 50 == 0) next += 300;
        uneven.add(next++, random.chance(0.5));
    }
    uneven.numel = next + 10;
    check_round_trip(uneven, true);
}

CASE(many_messages_are_applied_in_the_order_of_the_list) {
    const uint64_t numel = 30011;
    std::vector<Bytes> messages;
    for (uint64_t i = 0; i < 6; ++i) {
        Random random(i);
        const double density = i % 3 == 0 ? 0.001 : i % 3 == 1 ? 0.2 : 0.95;
        messages.push_back(encode(patterns::at_density(numel, density, random),
                                  header_for(numel, static_cast<uint16_t>(0x3e80 + 17 * i))));
        if (i % 2 == 0) messages.push_back(dense_message(numel, DenseType(1 + i / 2 % 3), i));
    }
    for (const uint64_t window : Numbers{512, 4096, 40000}) {
        check_apply<float>(messages, numel, window, 0.7, false);
        check_apply<double>(messages, numel, window, -1.0, true);
    }
}

CASE(dense_messages_of_any_type_are_applied_as_the_cpu_does) {
    for (const DenseType type : {DenseType::kFloat32, DenseType::kFloat64, DenseType::kBfloat16})
        for (const uint64_t numel : Numbers{0, 1, 5, 1000}) {
            check_apply<float>({dense_message(numel, type, numel)}, numel, 256, 1.0 / 3, false);
            check_apply<double>({dense_message(numel, type, numel)}, numel, 256, 1.0 / 3, true);
        }
}

CASE(the_valid_golden_messages_are_accepted_and_the_invalid_ones_refused) {
    const unsigned valid = for_every_golden("valid", [](const Bytes& bytes) {
        if (is_small(bytes)) check_verdict(bytes);
        if (is_small(bytes)) CHECK_EQUAL(EmulatedDecoder(bytes, numel_of(bytes), 1, true).failure(), 0U);
    });
    CHECK(valid >= 30);
    unsigned longer = 0;
    const unsigned invalid = for_every_golden("invalid", [&](const Bytes& bytes) {
        // A buffer on a device may be longer than its message.
        if (bytes.size() > kHeaderBytes && cpu_accepts(Bytes(bytes.begin(), bytes.end() - 1))) {
            ++longer;
            return;
        }
        if (numel_of(bytes) > kMaxNumel || is_small(bytes)) {
            CHECK(EmulatedDecoder(bytes, std::min(numel_of(bytes), kMaxNumel), 1, false).failure() != cuda::kSound);
        }
    });
    CHECK(invalid >= 45);
    CHECK_EQUAL(longer, 1U);
}

CASE(a_message_for_another_target_or_too_large_a_scale_is_refused) {
    const Bytes bytes = encode(Entries{10, {3}, {0}}, header_for(10, 0x7f00));
    CHECK_EQUAL(EmulatedDecoder(bytes, 10, 1.0, false).failure(), uint32_t{cuda::kSound});
    CHECK_EQUAL(EmulatedDecoder(bytes, 11, 1.0, false).failure(), uint32_t{cuda::kBadNumel});
    CHECK_EQUAL(EmulatedDecoder(bytes, 10, 1e9, false).failure(), uint32_t{cuda::kBadScale});
    CHECK_EQUAL(EmulatedDecoder(Bytes(bytes.begin(), bytes.end() - 1), 10, 1.0, false).failure(),
                uint32_t{cuda::kTruncated});
}

CASE(whatever_happens_to_the_bytes_the_verdict_is_the_cpu_s) {
    Random random(77);
    for (const Bytes& sample : samples())
        for (unsigned i = 0; i < 60; ++i) {
            Bytes bytes = sample;
            scramble(bytes, random);
            if (i % 20 != 0) mend_checksum(bytes);
            check_verdict(exactly(bytes.data(), bytes.size()));
        }
}

CASE(bytes_that_change_after_the_check_lead_to_no_access_out_of_bounds) {
    Random random(78);
    for (const Bytes& sample : samples())
        for (unsigned i = 0; i < 20; ++i) {
            Bytes bytes = exactly(sample.data(), sample.size());
            const uint64_t numel = numel_of(bytes);
            EmulatedDecoder decoder(bytes, numel, 1.0, false);
            scramble(bytes, random);  // in place: the decoder has read the header and the directory before
            std::vector<float> target(numel);
            target.shrink_to_fit();
            const std::vector<Array> arrays{{target.data(), numel, Dtype::kFloat32}};
            for (const cuda::ArrayRange& range : cuda::cut_ranges(arrays, numel, 512))
                for (uint64_t begin = range.begin; begin < range.end; begin += 512)
                    decoder.apply(range.arrays, begin, std::min(begin + 512, range.end));
        }
}
