// Size arithmetic up to 2^48 elements: a message holds changed elements only, so the tests need little memory.
#include "patterns.h"

using namespace gradwire;
using namespace support;

namespace {

Entries at(uint64_t numel, std::vector<uint64_t> positions) {
    Entries entries;
    entries.numel = numel;
    for (const uint64_t position : positions) entries.add(position, position % 2 == 1);
    return entries;
}

void check_entries_survive(const Entries& entries) {
    const Bytes bytes = encode(entries, header_for(entries.numel));
    CHECK(bytes == encode_plainly(entries, header_for(entries.numel)));
    CHECK(list(parse(bytes)) == entries);
}

// A header on its own, with the field of 8 bytes at `offset` replaced.
Bytes header_with(Bytes bytes, unsigned offset, uint64_t value) {
    std::memcpy(bytes.data() + offset, &value, 8);
    mend_checksum(bytes);
    return bytes;
}

}  // namespace

CASE(a_message_may_span_2_to_the_48_elements) {
    for_every_table([] {
        check_entries_survive(at(kMaxNumel, {}));
        check_entries_survive(at(kMaxNumel, {0}));
        check_entries_survive(at(kMaxNumel, {kMaxNumel - 1}));
        check_entries_survive(at(kMaxNumel, {0, kMaxNumel - 1}));
        check_entries_survive(at(kMaxNumel, {1, 2, 3, uint64_t{1} << 31, (uint64_t{1} << 32) + 1, uint64_t{1} << 47}));
    });
}

CASE(chunks_may_span_trillions_of_elements) {
    for_every_table([] {
        Random random(9);
        for (const uint64_t bits : Numbers{20, 31, 32, 33, 39}) {
            const check::Note note("farthest, in bits", bits);
            Entries entries = patterns::with_count(300, uint64_t{1} << bits, 12345, random);
            entries.numel = std::max(entries.numel, uint64_t{1} << 40);
            check_entries_survive(entries);
        }
        // A chunk whose first 255 elements lie close and whose last one far away, and the other way round.
        Entries far_end;
        for (uint64_t i = 0; i < 255; ++i) far_end.add(i, false);
        for (uint64_t i = 0; i < 9; ++i) far_end.add((uint64_t{1} << 45) + i, true);
        far_end.numel = kMaxNumel;
        check_entries_survive(far_end);
        Entries far_begin;
        for (uint64_t i = 0; i < 600; ++i) far_begin.add(kMaxNumel - 600 + i, i % 3 == 0);
        far_begin.numel = kMaxNumel;
        check_entries_survive(far_begin);
    });
}

CASE(positions_beyond_31_bits_reach_the_right_element_of_a_window) {
    // Both ends of the list's 31-bit distances.
    const uint64_t edge = kMostEntryDistance;
    for_every_table([&] {
        check_entries_survive(
            at(3 * edge, {edge - 1, edge, edge + 1, 2 * edge - 1, 2 * edge, 2 * edge + 1, 3 * edge - 1}));
    });
}

CASE(a_header_that_promises_more_than_there_is_is_refused) {
    const Bytes empty = encode(at(1000, {}), header_for(1000));
    CHECK_EQUAL(parse(empty).header.numel, 1000U);
    CHECK_EQUAL(parse(header_with(empty, kNumelAt, kMaxNumel)).header.numel, kMaxNumel);
    CHECK_THROWS(MessageError, parse(header_with(empty, kNumelAt, kMaxNumel + 1)));
    CHECK_THROWS(MessageError, parse(header_with(empty, kNumelAt, UINT64_MAX)));
    const Bytes some = encode(at(1000, {1, 500}), header_for(1000));
    for (const uint64_t value : {uint64_t{0}, uint64_t{1} << 20, uint64_t{1} << 48, uint64_t{1} << 63, UINT64_MAX})
        for (const unsigned offset : {kCountAt, kPayloadBytesAt})
            CHECK_THROWS(MessageError, parse(header_with(some, offset, value)));
}

CASE(a_count_without_its_signs_is_refused_at_every_size) {
    // The exponent must follow from the count, or the header is refused for that reason alone.
    for (uint64_t count = 17; count <= kMaxNumel; count *= 4) {
        Bytes bytes = encode(at(1000, {1, 500}), header_for(1000));
        bytes[7] = static_cast<uint8_t>(chunk_exponent(count));
        bytes = header_with(bytes, kNumelAt, kMaxNumel);
        CHECK_THROWS(MessageError, parse(header_with(bytes, kCountAt, count)));
    }
}

CASE(a_dense_header_of_2_to_the_48_values_is_refused_without_them) {
    const std::vector<float> values{1, 2, 3};
    const MessageBytes message = encode_dense({{values.data(), 3, Dtype::kFloat32}}, DenseType::kFloat32, 0, 0);
    Bytes bytes = exactly(message.bytes.get(), message.size);
    CHECK_EQUAL(parse(bytes).header.count, 3U);
    bytes = header_with(bytes, kNumelAt, kMaxNumel);
    CHECK_THROWS(MessageError, parse(bytes));
    bytes = header_with(bytes, kCountAt, kMaxNumel);
    CHECK_THROWS(MessageError, parse(bytes));
    bytes = header_with(bytes, kPayloadBytesAt, kMaxNumel * 4);
    CHECK_THROWS(MessageError, parse(bytes));
}

CASE(the_ceiling_holds_up_to_2_to_the_48_elements) {
    CHECK_EQUAL(max_ternary_bytes(0), 48U);
    CHECK_EQUAL(max_ternary_bytes(1), 49U);
    CHECK_EQUAL(max_ternary_bytes(100), 70U);
    CHECK_EQUAL(max_ternary_bytes(101), 71U);
    CHECK(max_ternary_bytes(kMaxNumel) > kMaxNumel / 5);
    CHECK(max_ternary_bytes(kMaxNumel) < kMaxNumel / 4);
}
