// Pass 1: every table against an oracle that processes one element at a time.
#include <limits>
#include <memory>
#include "apply.h"

#include "support.h"

using namespace gradwire;
using namespace support;

namespace {

constexpr Dtype kUpdates[] = {Dtype::kNone, Dtype::kFloat32, Dtype::kFloat64, Dtype::kFloat16, Dtype::kBfloat16};

template <class Residual>
struct Expected {
    std::vector<Residual> residual;
    Entries entries;
    uint64_t nonfinite = 0;
    uint64_t first_nonfinite = UINT64_MAX;
};

// `update` is null if it has already been added.
template <class Residual>
Expected<Residual> extract_plainly(const std::vector<Residual>& residual, const std::vector<double>* update,
                                   Levels<Residual> levels) {
    Expected<Residual> expected;
    expected.residual = residual;
    expected.entries.numel = residual.size();
    for (size_t i = 0; i < residual.size(); ++i) {
        const Residual before = residual[i];
        const Residual added = update ? static_cast<Residual>((*update)[i]) : Residual{0};
        Residual sum = update ? before + added : before;
        if (!std::isfinite(sum)) {
            if (expected.nonfinite++ == 0) expected.first_nonfinite = i;
            sum = std::isfinite(before) ? before : std::isfinite(added) ? added : Residual{0};
        }
        if (sum >= levels.bound) {
            expected.entries.add(i, false);
            sum -= levels.quantum;
        } else if (sum <= -levels.bound) {
            expected.entries.add(i, true);
            sum += levels.quantum;
        }
        expected.residual[i] = sum;
    }
    return expected;
}

template <class Residual>
bool same_bits(const Residual* a, const std::vector<Residual>& b) {
    return b.empty() || std::memcmp(a, b.data(), b.size() * sizeof(Residual)) == 0;
}

template <class Residual>
constexpr Dtype dtype_of() {
    return sizeof(Residual) == 8 ? Dtype::kFloat64 : Dtype::kFloat32;
}

template <class Residual>
bool supported(Dtype update) {
    return sizeof(Residual) == 8 || update != Dtype::kFloat64;
}

template <class Residual>
Residual as_residual(double value) {
    Residual residual;
    put_value(&residual, 0, dtype_of<Residual>(), value);
    return residual;
}

// Several arrays that are one update.
struct Update {
    std::vector<std::unique_ptr<UpdateArray>> arrays;
    std::vector<ConstArray> views;
    std::vector<double> values;

    void append(uint64_t numel, Dtype dtype, Random& random, double threshold, bool nonfinite) {
        arrays.push_back(std::make_unique<UpdateArray>(numel, dtype, random.below(4)));
        UpdateArray& array = *arrays.back();
        for (uint64_t i = 0; i < numel; ++i) {
            array.set(i, tricky_value(random, threshold, nonfinite));
            values.push_back(array[i]);
        }
        views.push_back(array.view());
    }
};

struct Situation {
    uint64_t numel;
    bool nonfinite;
    uint16_t threshold;
    unsigned threads;
};

template <class Residual>
std::vector<Residual> random_residual(Random& random, uint64_t numel, double threshold, bool nonfinite) {
    std::vector<Residual> residual(numel);
    for (Residual& value : residual) value = as_residual<Residual>(tricky_value(random, threshold, nonfinite));
    return residual;
}

template <class Residual>
void check_encoder(const std::vector<Residual>& residual, const Update* update, const Situation& at,
                   double rounding_point) {
    const auto levels = levels_of<Residual>(at.threshold, rounding_point);
    Expected<Residual> expected = extract_plainly(residual, update ? &update->values : nullptr, levels);
    const Bytes bytes = encode_plainly(expected.entries, header_for(at.numel, at.threshold));
    const std::vector<ConstArray>* views = update ? &update->views : nullptr;
    EncodeOptions options;
    options.threshold = at.threshold;
    options.rounding_point = rounding_point;
    options.key = 7;
    options.step = 1000;
    options.skip_nonfinite = true;
    const auto fresh_encoder = [&] {
        Encoder encoder(at.numel, dtype_of<Residual>(), at.threads);
        if (at.numel > 0) std::memcpy(encoder.residual(), residual.data(), at.numel * sizeof(Residual));
        return encoder;
    };
    {
        Encoder encoder = fresh_encoder();
        const Encoded encoded = encoder.encode(views, options);
        CHECK_EQUAL(encoded.skipped, expected.nonfinite);
        CHECK(same_bits(static_cast<const Residual*>(encoder.residual()), expected.residual));
        CHECK(exactly(encoded.messages[0].bytes.get(), encoded.messages[0].size) == bytes);
    }
    if (expected.nonfinite == 0) return;
    for (size_t i = 0; i < expected.entries.positions.size(); ++i)
        expected.residual[expected.entries.positions[i]] +=
            expected.entries.minus[i] ? -levels.quantum : levels.quantum;
    options.skip_nonfinite = false;
    Encoder encoder = fresh_encoder();
    bool thrown = false;
    try {
        encoder.encode(views, options);
    } catch (const NonFiniteUpdate& error) {
        thrown = true;
        CHECK_EQUAL(error.count, expected.nonfinite);
        CHECK_EQUAL(error.first_index, expected.first_nonfinite);
    }
    CHECK(thrown);
    CHECK(same_bits(static_cast<const Residual*>(encoder.residual()), expected.residual));
}

template <class Residual>
void check_encoder(const std::vector<Residual>& residual, const Update* update, const Situation& at) {
    for (const double rounding_point : {1.0, 0.5625}) check_encoder(residual, update, at, rounding_point);
}

// Return the magnitude around which values are drawn: that from which elements are sent, at one
// rounding point or the other.
double bound_of(const Situation& at, uint64_t seed) {
    return levels_of<double>(at.threshold, seed % 2 ? 0.5625 : 1.0).bound;
}

template <class Residual>
void check_one_array(const Situation& at, Dtype dtype, uint64_t seed) {
    const check::Note notes[] = {{"numel", at.numel}, {"update dtype", unsigned(dtype)}, {"seed", seed}};
    Random random(seed);
    const double bound = bound_of(at, seed);
    const auto residual = random_residual<Residual>(random, at.numel, bound, at.nonfinite);
    if (dtype == Dtype::kNone) return check_encoder<Residual>(residual, nullptr, at);
    Update update;
    update.append(at.numel, dtype, random, bound, at.nonfinite);
    check_encoder<Residual>(residual, &update, at);
}

template <class Residual>
void check_many_arrays(const Situation& at, uint64_t longest, uint64_t seed) {
    const check::Note notes[] = {{"numel", at.numel}, {"seed", seed}};
    Random random(seed);
    const double bound = bound_of(at, seed);
    const auto residual = random_residual<Residual>(random, at.numel, bound, at.nonfinite);
    Update update;
    for (uint64_t left = at.numel; left > 0;) {
        const uint64_t numel = std::min(left, random.below(longest));
        const Dtype dtype = kUpdates[1 + random.below(4)];
        update.append(numel, supported<Residual>(dtype) ? dtype : Dtype::kFloat32, random, bound, at.nonfinite);
        left -= numel;
    }
    update.append(0, Dtype::kFloat32, random, bound, false);
    check_encoder<Residual>(residual, &update, at);
}

// Check a kernel directly, with a residual of which only the elements are aligned, at the end of its memory.
template <class Residual>
void check_kernel(ExtractFunction<Residual> extract, Dtype dtype, uint64_t words, uint64_t seed) {
    Random random(seed);
    const uint64_t numel = words * 64;
    const auto levels = levels_of<Residual>(0x3f00, seed % 3 == 0 ? 0.5625 : 1.0);
    const uint64_t offset = random.below(4);
    const auto residual = random_residual<Residual>(random, numel, 0.5, seed % 2 == 1);
    Update update;
    update.append(numel, dtype == Dtype::kNone ? Dtype::kFloat32 : dtype, random, 0.5, seed % 2 == 1);
    const bool accumulated = dtype == Dtype::kNone;
    const auto expected = extract_plainly(residual, accumulated ? nullptr : &update.values, levels);
    std::vector<Residual> memory(offset, Residual{0});
    memory.insert(memory.end(), residual.begin(), residual.end());
    memory.shrink_to_fit();
    std::vector<MaskWord> list(words);
    Extracted extracted;
    extract(memory.data() + offset, accumulated ? nullptr : update.views[0].data, words, levels, 1000, list.data(),
            &extracted);
    CHECK(same_bits(memory.data() + offset, expected.residual));
    CHECK_EQUAL(extracted.count, expected.entries.positions.size());
    CHECK_EQUAL(extracted.nonfinite, expected.nonfinite);
    if (expected.nonfinite > 0) CHECK_EQUAL(extracted.first_nonfinite, expected.first_nonfinite + 64000);
    Entries found;
    found.numel = numel;
    for (uint64_t w = 0; w < extracted.words; ++w) {
        CHECK(list[w].changed != 0);
        CHECK_EQUAL(list[w].negative & ~list[w].changed, 0U);
        for (unsigned i = 0; i < 64; ++i)
            if (list[w].changed >> i & 1) found.add((list[w].index - 1000) * 64 + i, list[w].negative >> i & 1);
    }
    CHECK(found == expected.entries);
}

template <class F>
void for_every_pair(F f) {
    for (const Dtype dtype : kUpdates) {
        f(float{}, dtype);
        f(double{}, dtype);
    }
}

}  // namespace

CASE(a_kernel_equals_the_oracle_at_any_alignment) {
    for_every_table([] {
        for (uint64_t words = 0; words < 7; ++words)
            for (uint64_t seed = 1; seed < 9; ++seed)
                for (unsigned dtype = 0; dtype < kDtypes; ++dtype) {
                    const check::Note notes[] = {{"words", words}, {"seed", seed}, {"update dtype", dtype}};
                    if (kernels().float32.extract[dtype])
                        check_kernel<float>(kernels().float32.extract[dtype], Dtype(dtype), words, seed);
                    check_kernel<double>(kernels().float64.extract[dtype], Dtype(dtype), words, seed);
                }
    });
}

CASE(every_size_up_to_200_equals_the_oracle) {
    for_every_table([] {
        for_every_pair([](auto residual, Dtype dtype) {
            using Residual = decltype(residual);
            if (!supported<Residual>(dtype)) return;
            for (uint64_t numel = 0; numel <= 200; ++numel)
                check_one_array<Residual>({numel, false, 0x3f00, 1}, dtype, numel + 1);
        });
    });
}

CASE(large_updates_equal_the_oracle_at_any_threshold) {
    for_every_table([] {
        for_every_pair([](auto residual, Dtype dtype) {
            using Residual = decltype(residual);
            if (!supported<Residual>(dtype)) return;
            // 0.5; a threshold with all 8 significant bits; the smallest one; one whose multiples overflow
            for (const uint16_t threshold : {uint16_t{0x3f00}, uint16_t{0x3aff}, uint16_t{0x0001}, uint16_t{0x7f7f}})
                check_one_array<Residual>({5003, false, threshold, 1}, dtype, threshold);
        });
    });
}

CASE(nonfinite_elements_are_left_out_or_nothing_is_extracted) {
    for_every_table([] {
        for_every_pair([](auto residual, Dtype dtype) {
            using Residual = decltype(residual);
            if (!supported<Residual>(dtype)) return;
            for (const uint64_t numel : Numbers{1, 63, 64, 65, 127, 200, 3001})
                for (uint64_t seed = 1; seed < 6; ++seed)
                    check_one_array<Residual>({numel, true, 0x3f00, 1}, dtype, seed);
        });
    });
}

CASE(a_sequence_of_arrays_of_any_dtypes_equals_one_update) {
    for_every_table([] {
        for (uint64_t seed = 1; seed < 25; ++seed)
            for (const uint64_t longest : Numbers{3, 40, 130, 700}) {
                const check::Note note("longest array", longest);
                check_many_arrays<float>({1500 + seed, seed % 3 == 0, 0x3f00, 1}, longest, seed);
                check_many_arrays<double>({1500 + seed, seed % 3 == 0, 0x3f00, 1}, longest, seed);
            }
    });
}

CASE(any_number_of_threads_gives_the_same_bytes_and_residual) {
    for_every_table([] {
        for (unsigned threads = 1; threads <= 5; ++threads) {
            const check::Note note("threads", threads);
            check_many_arrays<float>({5 * 262144 / 2 + 77, threads % 2 == 0, 0x3f00, threads}, 300000, 3);
        }
        check_one_array<double>({3 * 262144 + 5, false, 0x3f00, 3}, Dtype::kFloat64, 4);
    });
}

CASE(the_first_nonfinite_element_is_found_in_any_thread) {
    const uint64_t numel = 3 * 262144;
    for (const uint64_t bad : Numbers{0, 262143, 300000, numel - 1}) {
        const check::Note note("index", bad);
        std::vector<float> update(numel, 0.0F);
        update[bad] = update[numel - 1] = std::numeric_limits<float>::infinity();
        const std::vector<ConstArray> views{{update.data(), numel, Dtype::kFloat32}};
        EncodeOptions options;
        options.threshold = 0x3f00;
        Encoder encoder(numel, Dtype::kFloat32, 3);
        uint64_t first = UINT64_MAX;
        try {
            encoder.encode(&views, options);
        } catch (const NonFiniteUpdate& error) {
            first = error.first_index;
        }
        CHECK_EQUAL(first, bad);
    }
}

CASE(each_half_and_bfloat16_is_converted_exactly) {
    for_every_table([] {
        for (const Dtype dtype : {Dtype::kFloat16, Dtype::kBfloat16}) {
            const check::Note note("update dtype", unsigned(dtype));
            const uint64_t numel = 65536;
            UpdateArray update(numel, dtype, 1);
            for (uint64_t i = 0; i < numel; ++i) {
                const auto bits = static_cast<uint16_t>(i);
                std::memcpy(static_cast<uint8_t*>(update.data()) + 2 * i, &bits, 2);
            }
            const std::vector<ConstArray> views{update.view()};
            EncodeOptions options;
            options.threshold = 0x7f7f;
            options.skip_nonfinite = true;
            Encoder encoder(numel, Dtype::kFloat64, 1);
            encoder.encode(&views, options);
            const auto* residual = static_cast<const double*>(encoder.residual());
            for (uint64_t i = 0; i < numel; ++i) {
                const double value = update[i];
                const double most = static_cast<double>(bfloat16_to_float(0x7f7f));
                if (std::isfinite(value) && std::fabs(value) < most) CHECK_EQUAL(residual[i], value);
                if (!std::isfinite(value)) CHECK_EQUAL(residual[i], 0.0);
            }
        }
    });
}

CASE(encoding_without_an_update_sends_the_rest) {
    for_every_table([] {
        std::vector<float> update(100, 1.75F);
        const std::vector<ConstArray> views{{update.data(), update.size(), Dtype::kFloat32}};
        EncodeOptions options;
        options.threshold = 0x3f00;
        Encoder encoder(100, Dtype::kFloat32, 1);
        CHECK_EQUAL(encoder.encode(&views, options).messages[0].header.count, 100U);
        CHECK_EQUAL(encoder.encode(nullptr, options).messages[0].header.count, 100U);
        CHECK_EQUAL(encoder.encode(nullptr, options).messages[0].header.count, 100U);
        CHECK_EQUAL(encoder.encode(nullptr, options).messages[0].header.count, 0U);
        for (uint64_t i = 0; i < 100; ++i) CHECK_EQUAL(static_cast<const float*>(encoder.residual())[i], 0.25F);
    });
}

CASE(a_budget_keeps_the_largest_elements_and_puts_the_others_back) {
    for_every_table([] {
        for (const unsigned threads : {1U, 3U})
            for (const uint64_t parts : Numbers{1, 3}) {
                const uint64_t numel = 600'003;
                Random random(9);
                std::vector<float> update(numel);
                for (float& value : update) value = static_cast<float>(random.below(512)) / 64 - 4;  // exact
                const std::vector<ConstArray> views{{update.data(), numel, Dtype::kFloat32}};
                const Partition partition{numel, parts, 10};
                EncodeOptions options;
                options.threshold = 0x3f00;
                options.max_bytes = 2000;
                options.most_changed = 1000;
                Encoder encoder(numel, Dtype::kFloat32, threads);
                const Encoded encoded = encoder.encode(&views, options, partition);
                std::vector<float> sum(numel);
                uint64_t count = 0;
                for (uint64_t p = 0; p < parts; ++p) {
                    const MessageBytes& message = encoded.messages[p];
                    count += message.header.count;
                    CHECK_EQUAL(message.header.threshold, 0x4080);  // 4, of which there are more than enough
                    apply_messages({message.view()}, {{sum.data(), numel, Dtype::kFloat32}}, {partition, p}, 1.0);
                }
                CHECK_EQUAL(count, 1000U);
                CHECK(encoded.reached > 400'000);
                const auto* residual = static_cast<const float*>(encoder.residual());
                for (uint64_t i = 0; i < numel; ++i) CHECK_EQUAL(sum[i] + residual[i], update[i]);
            }
    });
}

CASE(a_difference_is_encoded_as_a_residual_that_holds_it) {
    for_every_table([] {
        for (const unsigned threads : {1U, 3U})
            for (const uint64_t numel : Numbers{1, 63, 1'025, 600'003}) {
                Random random(numel);
                // Exactly as much memory as the arrays need: nothing beyond may be read.
                const auto values = [&random](uint64_t count) {
                    auto memory = std::make_unique<float[]>(count);
                    for (uint64_t i = 0; i < count; ++i)
                        memory[i] = static_cast<float>(random.below(512)) / 64 - 4;  // exact differences
                    return memory;
                };
                const uint64_t first = numel / 3;
                const std::unique_ptr<float[]> arrays[] = {values(first), values(numel - first), values(first),
                                                           values(numel - first)};
                const auto views_of = [&](int begin) {
                    return std::vector<ConstArray>{{arrays[begin].get(), first, Dtype::kFloat32},
                                                   {arrays[begin + 1].get(), numel - first, Dtype::kFloat32}};
                };
                const std::vector<ConstArray> now = views_of(0), before = views_of(2);
                EncodeOptions options;
                options.threshold = 0x3f80;
                Encoder encoder(numel, Dtype::kFloat32, threads), expected(numel, Dtype::kFloat32, threads);
                auto* residual = static_cast<float*>(encoder.residual());
                auto* differences = static_cast<float*>(expected.residual());
                for (uint64_t i = 0; i < numel; ++i) {
                    const int place = i >= first;
                    const uint64_t at = i - (place ? first : 0);
                    differences[i] = arrays[place][at] - arrays[2 + place][at];
                    residual[i] = 9.0F;
                }
                const SampledQuantiles sampled = encoder.sample({&now, &before}, options.threshold, 1.0, 0.01, 3);
                CHECK_EQUAL(sampled.now, expected.sample(nullptr, options.threshold, 1.0, 0.01, 3).now);
                const Encoded encoded = encoder.encode({&now, &before}, options);
                const Encoded own = expected.encode(nullptr, options);
                CHECK(exactly(encoded.messages[0].bytes.get(), encoded.messages[0].size) ==
                      exactly(own.messages[0].bytes.get(), own.messages[0].size));
                for (uint64_t i = 0; i < numel; ++i) CHECK_EQUAL(residual[i], differences[i]);
            }
    });
}

CASE(an_encoder_without_a_residual_sends_what_one_with_a_residual_sends) {
    for_every_table([] {
        for (const unsigned threads : {1U, 3U})
            for (const uint64_t numel : Numbers{1, 63, 1'025, 600'003})
                for (const uint64_t parts : {1, 3}) {
                    Random random(numel + parts);
                    std::vector<float> values[2];
                    for (std::vector<float>& array : values)
                        for (uint64_t i = 0; i < numel; ++i)
                            array.push_back(static_cast<float>(random.below(512)) / 64 - 4);  // exact differences
                    const uint64_t first = numel / 3;
                    const auto views_of = [&](const std::vector<float>& array) {
                        return std::vector<ConstArray>{{array.data(), first, Dtype::kFloat32},
                                                       {array.data() + first, numel - first, Dtype::kFloat32}};
                    };
                    const std::vector<ConstArray> now = views_of(values[0]), before = views_of(values[1]);
                    const Input difference{&now, &before};
                    const Partition partition{numel, parts, 9};
                    Encoder with(numel, Dtype::kFloat32, threads), without(nullptr, numel, Dtype::kFloat32, threads);
                    CHECK_EQUAL(without.sample(difference, 0x3f80, 1.0, 0.01, 3).now,
                                with.sample(difference, 0x3f80, 1.0, 0.01, 3).now);
                    const auto check = [&](const Encoded& encoded, const Encoded& expected) {
                        CHECK_EQUAL(encoded.reached, expected.reached);
                        for (uint64_t p = 0; p < parts; ++p)
                            CHECK(exactly(encoded.messages[p].bytes.get(), encoded.messages[p].size) ==
                                  exactly(expected.messages[p].bytes.get(), expected.messages[p].size));
                    };
                    EncodeOptions options;
                    options.threshold = 0x3f80;
                    check(without.encode(difference, options, partition), with.encode(difference, options, partition));
                    // Only the largest, some of which are equal.
                    options.max_bytes = 1;
                    options.most_changed = numel / 5;
                    check(without.encode(difference, options, partition), with.encode(difference, options, partition));
                    check(without.encode_dense(difference, DenseType::kBfloat16, options, partition),
                          with.encode_dense(difference, DenseType::kBfloat16, options, partition));
                    CHECK(without.residual() == nullptr);
                    values[0][numel / 2] = std::numeric_limits<float>::quiet_NaN();
                    CHECK_THROWS(NonFiniteUpdate, without.encode(difference, options, partition));
                }
    });
}

CASE(a_dense_message_sends_the_whole_residual) {
    for_every_table([] {
        Random random(5);
        Update update;
        update.append(301, Dtype::kFloat64, random, 0.5, false);
        EncodeOptions options;
        Encoder encoder(301, Dtype::kFloat64, 1);
        const Encoded encoded =
            encoder.encode_dense(&update.views, DenseType::kFloat64, options, undivided(encoder.numel()));
        const Bytes bytes = exactly(encoded.messages[0].bytes.get(), encoded.messages[0].size);
        std::vector<double> values(301);
        decode_dense(parse(bytes), values.data());
        for (uint64_t i = 0; i < 301; ++i) {
            CHECK_EQUAL(values[i], update.values[i]);
            CHECK_EQUAL(static_cast<const double*>(encoder.residual())[i], 0.0);
        }
    });
}

CASE(clipping_limits_the_residual_and_reports_the_removed_sum) {
    Encoder encoder(3000, Dtype::kFloat32, 1);
    auto* residual = static_cast<float*>(encoder.residual());
    residual[0] = 2;
    residual[1500] = -3;
    residual[2999] = 1;
    const Clipped clipped = encoder.clip(1);
    CHECK_EQUAL(clipped.count, 2U);
    CHECK_EQUAL(clipped.sum, -1.0);
    CHECK_EQUAL(residual[0], 1.0F);
    CHECK_EQUAL(residual[1500], -1.0F);
    CHECK_EQUAL(residual[2999], 1.0F);
}
