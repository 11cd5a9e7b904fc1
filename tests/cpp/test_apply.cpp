// Applying: many messages over many arrays are the messages one after the other, bit for bit.
#include "decoder.h"
#include "patterns.h"

using namespace gradwire;
using namespace support;

namespace {

// A target cut into arrays of odd sizes, each ending where its memory ends.
struct Target {
    std::vector<std::vector<float>> floats;
    std::vector<std::vector<double>> doubles;
    std::vector<Array> arrays;

    Target(uint64_t numel, uint64_t longest, bool mixed, uint64_t seed) {
        Random random(seed);
        floats.reserve(numel + 2);
        doubles.reserve(numel + 2);
        for (uint64_t left = numel; left > 0;) {
            const uint64_t size = std::min(left, random.below(longest + 1));
            if (mixed && random.chance(0.5)) {
                doubles.emplace_back(size);
                for (double& value : doubles.back()) value = random.uniform();
                arrays.push_back({doubles.back().data(), size, Dtype::kFloat64});
            } else {
                floats.emplace_back(size);
                for (float& value : floats.back()) value = static_cast<float>(random.uniform());
                arrays.push_back({floats.back().data(), size, Dtype::kFloat32});
            }
            left -= size;
        }
    }
    bool operator==(const Target& other) const { return floats == other.floats && doubles == other.doubles; }

    // Adds `scale` times the message element by element.
    void add_plainly(const std::vector<double>& steps) {
        uint64_t at = 0;
        for (const Array& array : arrays)
            for (uint64_t i = 0; i < array.numel; ++i, ++at) {
                if (array.dtype == Dtype::kFloat64)
                    static_cast<double*>(array.data)[i] += steps[at];
                else
                    static_cast<float*>(array.data)[i] += static_cast<float>(steps[at]);
            }
    }
};

struct Sent {
    Bytes bytes;
    std::vector<double> values;  // the decoded values at scale 1, which are exact
};

Sent send(const Entries& entries, uint16_t threshold) {
    Sent sent{encode(entries, header_for(entries.numel, threshold)), std::vector<double>(entries.numel)};
    const double quantum = static_cast<double>(bfloat16_to_float(threshold));
    for (size_t i = 0; i < entries.positions.size(); ++i)
        sent.values[entries.positions[i]] = entries.minus[i] ? -quantum : quantum;
    return sent;
}

Sent send_dense(uint64_t numel, DenseType dtype, Random& random) {
    UpdateArray values(numel, Dtype::kFloat32, 0);
    Sent sent{{}, {}};
    for (uint64_t i = 0; i < numel; ++i) {
        values.set(i, static_cast<double>(random.below(256)) / 64 - 2);  // exact in every dtype
        sent.values.push_back(values[i]);
    }
    const MessageBytes message = encode_dense({values.view()}, dtype, 1, 2);
    sent.bytes = exactly(message.bytes.get(), message.size);
    return sent;
}

// Add with momentum, element by element.
template <class Parts>
void add_momentum_plainly(const Parts& added, double factor, Parts& velocity, Parts& target, Parts& second) {
    using Value = typename Parts::value_type::value_type;
    for (size_t part = 0; part < added.size(); ++part)
        for (size_t i = 0; i < added[part].size(); ++i) {
            velocity[part][i] = static_cast<Value>(factor) * (velocity[part][i] + added[part][i]);
            target[part][i] += added[part][i] + velocity[part][i];
            second[part][i] += added[part][i] + velocity[part][i];
        }
}

void check_momentum(const std::vector<Sent>& sent, uint64_t numel, uint64_t longest, bool mixed, double scale) {
    const check::Note notes[] = {{"messages", sent.size()}, {"numel", numel}, {"longest array", longest}};
    std::vector<MessageView> views;
    for (const Sent& one : sent) views.push_back(parse(one.bytes));
    const auto make = [&] { return Target(numel, longest, mixed, 1); };
    Target target = make(), velocity = make(), second = make();
    Target expected = make(), expected_velocity = make(), expected_second = make(), added = make();
    for (auto& part : added.floats) std::fill(part.begin(), part.end(), 0.0F);
    for (auto& part : added.doubles) std::fill(part.begin(), part.end(), 0.0);
    const size_t own = views.size() / 2;

    const SecondTarget given{second.arrays, own};
    apply_with_momentum(views, target.arrays, scale, {velocity.arrays, 0.75}, &given);

    for (const MessageView& view : views) apply_messages({view}, added.arrays, scale);
    add_momentum_plainly(added.floats, 0.75, expected_velocity.floats, expected.floats, expected_second.floats);
    add_momentum_plainly(added.doubles, 0.75, expected_velocity.doubles, expected.doubles, expected_second.doubles);
    Target whole_second = make();
    whole_second.floats = expected_second.floats;
    whole_second.doubles = expected_second.doubles;
    apply_messages({views[own]}, expected_second.arrays, -1.0);
    CHECK(target == expected);
    CHECK(velocity == expected_velocity);
    CHECK(second == expected_second);

    Target alone = make(), another_velocity = make();
    apply_with_momentum(views, alone.arrays, scale, {another_velocity.arrays, 0.75});
    CHECK(alone == expected);
    Target in_parts = make(), its_velocity = make(), its_second = make();
    const SecondTarget in_parts_too{its_second.arrays, own};
    apply_with_momentum(views, in_parts.arrays, scale, {its_velocity.arrays, 0.75}, &in_parts_too, 4);
    CHECK(in_parts == expected);
    CHECK(its_velocity == expected_velocity);
    CHECK(its_second == expected_second);
    Target holds_none = make(), third_velocity = make(), third = make();
    const SecondTarget without_own{holds_none.arrays, views.size()};
    apply_with_momentum(views, third.arrays, scale, {third_velocity.arrays, 0.75}, &without_own);
    CHECK(holds_none == whole_second);
}

void check_messages(const std::vector<Sent>& sent, uint64_t numel, uint64_t longest, bool mixed, double scale) {
    const check::Note notes[] = {{"messages", sent.size()}, {"numel", numel}, {"longest array", longest}};
    std::vector<MessageView> views;
    for (const Sent& one : sent) views.push_back(parse(one.bytes));
    Target together(numel, longest, mixed, 1);
    Target singly(numel, longest, mixed, 1);
    Target plainly(numel, longest, mixed, 1);
    apply_messages(views, together.arrays, scale);
    for (const MessageView& view : views) apply_messages({view}, singly.arrays, scale);
    for (const Sent& one : sent) {
        std::vector<double> steps = one.values;
        for (double& step : steps) step *= scale;
        plainly.add_plainly(steps);
    }
    CHECK(together == singly);
    CHECK(together == plainly);
    Target in_parts(numel, longest, mixed, 1);
    apply_messages(views, in_parts.arrays, scale, nullptr, 3);
    CHECK(in_parts == together);
    for (const size_t own : {size_t{0}, sent.size() / 2, sent.size()}) {
        Target first(numel, longest, mixed, 1);
        Target second(numel, longest, mixed, 1);
        Target expected(numel, longest, mixed, 1);
        const SecondTarget given{second.arrays, own};
        apply_messages(views, first.arrays, scale, &given, 2);
        for (size_t i = 0; i < views.size(); ++i)
            apply_messages({views[i]}, expected.arrays, i == own ? scale - 1.0 : scale);
        CHECK(first == together);
        CHECK(second == expected);
    }
    check_momentum(sent, numel, longest, mixed, scale);
}

// A sink that records the output of a decoder.
class Record {
  public:
    explicit Record(uint64_t first) : first_(first) {}

    static uint64_t capacity() { return kCapacity; }
    Entry* entries() { return entries_; }
    void add_entries(uint64_t found) {
        for (uint64_t i = 0; i < found; ++i) add(first_ + (entries_[i] & ~kEntryMinus), entries_[i] >> 31);
    }
    uint64_t add_bitmap(const BitRun& changed, const BitRun& signs, uint64_t first, uint64_t numel) {
        uint64_t set = 0;
        for (uint64_t i = 0; i < numel; ++i)
            if (bit_of(changed, i)) add(first + i, bit_of(signs, set++));
        return set;
    }

    std::vector<uint64_t> positions;
    std::vector<bool> minus;

  private:
    // Bits beyond the end of a run are zero.
    static bool bit_of(const BitRun& run, uint64_t i) {
        const uint64_t bit = run.bit + i;
        return bit / 8 < run.size && (run.bytes[bit / 8] >> (bit % 8) & 1);
    }
    void add(uint64_t position, bool is_minus) {
        positions.push_back(position);
        minus.push_back(is_minus);
    }
    static constexpr uint64_t kCapacity = 100;
    Entry entries_[kCapacity];
    uint64_t first_;
};

void check_begins(const Entries& entries, Random& random) {
    const Bytes bytes = encode(entries, header_for(entries.numel));
    const MessageView view = parse(bytes);
    std::vector<uint64_t> begins{0, 1, 64, entries.numel / 2, entries.numel - 1};
    for (unsigned i = 0; i < 10; ++i) begins.push_back(random.below(entries.numel));
    for (const uint64_t begin : begins) {
        if (begin >= entries.numel) continue;
        Decoder decoder(view);
        decoder.skip_to(begin);
        Record record(begin);
        decoder.advance(begin, entries.numel, record);
        Record expected(0);
        for (size_t i = 0; i < entries.positions.size(); ++i)
            if (static_cast<uint64_t>(entries.positions[i]) >= begin) {
                expected.positions.push_back(static_cast<uint64_t>(entries.positions[i]));
                expected.minus.push_back(entries.minus[i]);
            }
        const check::Note notes[] = {{"begin", begin}, {"numel", entries.numel}};
        CHECK(record.positions == expected.positions);
        CHECK(record.minus == expected.minus);
    }
}

}  // namespace

CASE(a_decoder_may_begin_anywhere) {
    for_every_table([] {
        Random random(27);
        for (const uint64_t numel : Numbers{1, 65, 3000, 70001})
            patterns::for_every_pattern(numel, random, [&](const Entries& entries) { check_begins(entries, random); });
    });
}

CASE(many_messages_over_many_arrays_equal_single_ones) {
    for_every_table([] {
        Random random(21);
        for (const uint64_t numel : Numbers{1, 64, 200, 5000, 150000})
            for (const double density : {0.0005, 0.02, 0.3, 0.55, 0.8, 1.0}) {
                std::vector<Sent> sent;
                for (unsigned i = 0; i < 5; ++i)
                    sent.push_back(send(patterns::at_density(numel, density, random),
                                        static_cast<uint16_t>(0x3f00 + 0x40 * (i % 3))));
                for (const uint64_t longest : {numel, numel / 3 + 1, uint64_t{100}}) {
                    if (longest < 100 && numel > 5000) continue;
                    check_messages(sent, numel, longest, false, 1.0);
                    check_messages(sent, numel, longest, true, -0.5);
                }
            }
    });
}

CASE(messages_of_all_kinds_and_patterns_mix) {
    for_every_table([] {
        Random random(22);
        const uint64_t numel = 70001;
        std::vector<Sent> sent;
        patterns::for_every_pattern(numel, random, [&](const Entries& entries) {
            sent.push_back(send(entries, 0x3e80));
            if (sent.size() % 7 == 3)
                sent.push_back(send_dense(numel, static_cast<DenseType>(1 + sent.size() % 3), random));
        });
        check_messages(sent, numel, numel, false, 1.0);
        check_messages(sent, numel, 9001, true, 2.0);
        check_messages(sent, numel, 130, true, 1.0);
    });
}

CASE(arrays_of_one_element_and_of_none_are_targets_too) {
    for_every_table([] {
        Random random(23);
        for (const double density : {0.01, 0.4, 0.7, 0.95}) {
            const std::vector<Sent> sent{send(patterns::at_density(1500, density, random), 0x3f00),
                                         send(patterns::at_density(1500, density, random), 0x3f80)};
            check_messages(sent, 1500, 1, false, 1.0);
            check_messages(sent, 1500, 2, true, 1.0);
        }
    });
}

CASE(signs_and_zeros_are_added_not_stored) {
    for_every_table([] {
        Random random(24);
        const uint64_t numel = 130;
        const Entries entries = patterns::choose(numel, random, [](uint64_t i) { return i % 3 != 0; });
        const Bytes bytes = encode(entries, header_for(numel));
        std::vector<float> target(numel, -0.0F);
        apply_messages({parse(bytes)}, {{target.data(), numel, Dtype::kFloat32}}, 1.0);
        for (uint64_t i = 0; i < numel; i += 3) CHECK(std::signbit(target[i]) && target[i] == 0);
        // -0.5 + 0.5 is +0, as it is element by element.
        apply_messages({parse(bytes)}, {{target.data(), numel, Dtype::kFloat32}}, -1.0);
        for (uint64_t i = 1; i < numel; i += 3) CHECK(!std::signbit(target[i]) && target[i] == 0);
    });
}

CASE(a_message_of_another_size_changes_nothing) {
    std::vector<float> target(10, 1.0F);
    Random random(25);
    const Bytes fits = encode(patterns::at_density(10, 1, random), header_for(10));
    const Bytes other = encode(patterns::at_density(11, 1, random), header_for(11));
    CHECK_THROWS(MessageError,
                 apply_messages({parse(fits), parse(other)}, {{target.data(), 10, Dtype::kFloat32}}, 1.0));
    CHECK(target == std::vector<float>(10, 1.0F));
}

CASE(one_invalid_message_keeps_all_of_them_from_the_target) {
    for_every_table([] {
        Random random(26);
        const uint64_t numel = 3000;
        Bytes good = encode(patterns::at_density(numel, 0.1, random), header_for(numel));
        Bytes bad = encode(patterns::at_density(numel, 0.1, random), header_for(numel));
        const MessageView views[] = {parse(good), parse(bad)};
        std::fill(bad.begin() + 60, bad.end(), uint8_t{0});  // after it was parsed
        std::vector<float> target(numel, 1.0F);
        CHECK_THROWS(MessageError,
                     apply_messages({views[0], views[1]}, {{target.data(), numel, Dtype::kFloat32}}, 1.0));
        CHECK(target == std::vector<float>(numel, 1.0F));
    });
}
