// Pass 2 and back: every table writes the bytes that docs/message-format.md specifies, and reads them.
#include "patterns.h"

using namespace gradwire;
using namespace support;

namespace {

// The bytes equal the plain encoder's, are valid, stay below the ceiling and hold the same entries and sums.
void check_round_trip(const Entries& entries) {
    const Header header = header_for(entries.numel);
    const Bytes bytes = encode(entries, header);
    CHECK(bytes == encode_plainly(entries, header));
    CHECK(bytes.size() <= max_ternary_bytes(entries.numel));
    const MessageView message = parse(bytes);
    CHECK_EQUAL(message.header.count, entries.positions.size());
    CHECK(list(message) == entries);
    std::vector<float> target(entries.numel, 1.0F);
    std::vector<float> expected(entries.numel, 1.0F);
    for (size_t i = 0; i < entries.positions.size(); ++i)
        expected[entries.positions[i]] += entries.minus[i] ? -0.5F : 0.5F;
    apply_messages({message}, {{target.data(), target.size(), Dtype::kFloat32}}, 1.0);
    CHECK(target == expected);
}

}  // namespace

CASE(every_pattern_of_few_elements_survives) {
    for_every_table([] {
        for (uint64_t numel = 0; numel <= 140; ++numel) {
            const check::Note note("numel", numel);
            Random random(numel + 1);
            patterns::for_every_pattern(numel, random, check_round_trip);
        }
    });
}

CASE(every_pattern_of_many_chunks_survives) {
    for_every_table([] {
        for (const uint64_t numel : Numbers{1000, 4096, 20011}) {
            const check::Note note("numel", numel);
            Random random(numel);
            patterns::for_every_pattern(numel, random, check_round_trip);
        }
    });
}

CASE(any_subset_of_eight_elements_survives) {
    for_every_table([] {
        for (unsigned subset = 0; subset < 256; ++subset)
            for (const uint64_t shift : Numbers{0, 59, 64}) {
                Random random(subset);
                Entries entries = patterns::choose(shift + 8, random,
                                                   [&](uint64_t i) { return i >= shift && subset >> (i - shift) & 1; });
                check_round_trip(entries);
            }
    });
}

CASE(counts_around_multiples_of_the_chunk_size_survive) {
    for_every_table([] {
        for (const uint64_t changed :
             Numbers{255, 256, 257, 511, 512, 513, 768, 1024, 4095, 4096, 4097, 4608, 16384, 16385, 16896})
            for (const uint64_t farthest : Numbers{0, 1, 3, 20, 300})
                for (const uint64_t behind : Numbers{0, 1, 63, 1000}) {
                    const check::Note notes[] = {{"changed", changed}, {"farthest", farthest}, {"behind", behind}};
                    if (changed > 4097 && behind == 63) continue;
                    Random random(changed + farthest + behind);
                    check_round_trip(patterns::with_count(changed, farthest, behind, random));
                }
    });
}

CASE(chunks_that_begin_and_end_at_any_bit_of_a_word_survive) {
    for_every_table([] {
        for (uint64_t before = 0; before < 66; ++before)
            for (uint64_t behind = 0; behind < 66; behind += behind < 3 ? 1 : 13) {
                const check::Note notes[] = {{"before", before}, {"behind", behind}};
                Random random(before * 100 + behind);
                // Two chunks of which the first ends after 256 elements behind `before` unchanged ones.
                Entries entries;
                for (uint64_t i = 0; i < 300; ++i) entries.add(before + i + (i > 255 ? behind : 0), random.chance(0.5));
                entries.numel = entries.positions.back() + 1 + behind;
                check_round_trip(entries);
            }
    });
}

CASE(every_rice_parameter_survives) {
    for_every_table([] {
        for (unsigned bits = 0; bits <= 16; ++bits) {
            const check::Note note("farthest, in bits", bits);
            Random random(bits + 1);
            for (const uint64_t changed : Numbers{1, 2, 3, 4, 5, 9, 40, 270}) {
                const Entries entries = patterns::with_count(changed, uint64_t{1} << bits, 5, random);
                check_round_trip(entries);
            }
        }
    });
}

CASE(any_number_of_threads_writes_the_same_bytes) {
    Random random(11);
    for (const double density : {0.02, 0.5, 0.9}) {
        const Entries entries = patterns::at_density(400000, density, random);
        const Bytes expected = encode_plainly(entries, header_for(entries.numel));
        for_every_table([&] {
            for (unsigned threads = 1; threads <= 5; ++threads) {
                const check::Note note("threads", threads);
                CHECK(encode(entries, header_for(entries.numel), threads) == expected);
            }
        });
    }
}

CASE(the_worst_arrangement_stays_below_the_ceiling) {
    Random random(3);
    // Chunks of 256 changed and 137 unchanged elements: 20 * 137 <= 7 * 393, as few more bits as possible to list them.
    for (const uint64_t unchanged : Numbers{135, 136, 137, 138, 139, 140}) {
        const check::Note note("unchanged", unchanged);
        for (const bool clustered : {false, true}) {
            Entries entries;
            uint64_t position = 0;
            for (uint64_t chunk = 0; chunk < 63; ++chunk) {
                uint64_t left = unchanged;
                for (uint64_t changed = 256; changed > 0;) {
                    const bool skip =
                        left > 0 &&
                        (clustered || random.chance(static_cast<double>(left) / static_cast<double>(left + changed)));
                    if (skip) {
                        --left;
                    } else {
                        entries.add(position, random.chance(0.5));
                        --changed;
                    }
                    ++position;
                    if (changed == 1 && left > 0) position += std::exchange(left, 0U);
                }
            }
            entries.numel = position;
            for_every_table([&] { check_round_trip(entries); });
        }
    }
}

CASE(the_shape_of_a_message_follows_the_specification) {
    CHECK_EQUAL(chunk_exponent(0), 8U);
    CHECK_EQUAL(chunk_exponent(1), 8U);
    CHECK_EQUAL(chunk_exponent(8192), 8U);
    CHECK_EQUAL(chunk_exponent(8193), 9U);
    CHECK_EQUAL(chunk_exponent(kMaxNumel), 26U);
    for (uint64_t count = 1; count < kMaxNumel; count = count * 3 + 1)
        CHECK_EQUAL(chunk_exponent(count), std::max(8U, bit_length(count - 1) / 2 + 2));
    // Inverted chunks that list anything have k >= 1, so that a missing Q always means a bitmap or a full chunk.
    for (uint64_t changed = 1; changed <= 600; ++changed)
        for (uint64_t unchanged = 0; unchanged <= 600; ++unchanged) {
            const ChunkShape shape = chunk_shape(changed, unchanged);
            CHECK(!shape.inverted || shape.listed == 0 || shape.rice >= 1);
            CHECK_EQUAL(shape.inverted, 20 * unchanged <= 7 * (changed + unchanged));
        }
}

CASE(the_checksum_is_crc_32c) {
    // RFC 3720, appendix B.4
    struct Known {
        Bytes bytes;
        uint32_t crc;
    };
    Known all[] = {{Bytes(32, 0), 0x8a9136aaU}, {Bytes(32, 0xff), 0x62a8ab43U}, {Bytes(32), 0x46dd794eU}};
    for (unsigned i = 0; i < 32; ++i) all[2].bytes[i] = static_cast<uint8_t>(i);
    for_every_table([&] {
        for (const Known& known : all) {
            CHECK_EQUAL(~kernels().crc32c(~uint32_t{0}, known.bytes.data(), 32), known.crc);
            // In two parts, of which the second begins at any byte.
            for (unsigned cut = 0; cut <= 32; ++cut) {
                const uint32_t first = kernels().crc32c(~uint32_t{0}, known.bytes.data(), cut);
                CHECK_EQUAL(~kernels().crc32c(first, known.bytes.data() + cut, 32 - cut), known.crc);
            }
        }
    });
}
