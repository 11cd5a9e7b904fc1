// The CUDA encoder's algorithms on emulated threads against the CPU's codec: the same bytes and the same residual.
#include "emulated_encoder.h"
#include "patterns.h"

using namespace gradwire;
using namespace support;

namespace {

template <class F>
void in_both_orders(F f) {
    for (const bool backwards : {false, true}) {
        const check::Note note("backwards", uint64_t{backwards});
        f(backwards);
    }
}

cuda::HeaderWords words_of(const Header& header) { return {header.threshold, header.flags, header.key, header.step}; }

// Encode entries from a residual that holds nothing else.
void check_entries(const Entries& entries, bool backwards) {
    const Header header = header_for(entries.numel);
    std::vector<float> residual(entries.numel, 0.25F);
    for (size_t i = 0; i < entries.positions.size(); ++i)
        residual[entries.positions[i]] = entries.minus[i] ? -0.5F : 0.5F;
    EmulatedEncoder encoder(entries.numel, backwards);
    encoder.extract<float>(residual.data(), nullptr, {0.5F, 0.5F});
    CHECK(encoder.encode(words_of(header), false) == encode(entries, header));
}

template <class Residual>
constexpr Dtype dtype_of() {
    return sizeof(Residual) == 8 ? Dtype::kFloat64 : Dtype::kFloat32;
}

// Compare the CPU and the emulated threads on copies of the same residual and update.
template <class Residual>
void check_update(const std::vector<UpdateArray>* arrays, uint64_t numel, uint16_t threshold, bool skip, uint64_t seed,
                  bool backwards, double rounding_point) {
    std::vector<ConstArray> views;
    if (arrays)
        for (const UpdateArray& array : *arrays) views.push_back(array.view());
    const std::vector<ConstArray>* update = arrays ? &views : nullptr;
    const auto levels = levels_of<Residual>(threshold, rounding_point);
    Random random(seed);
    Encoder encoder(numel, dtype_of<Residual>(), 1);
    auto* expected = static_cast<Residual*>(encoder.residual());
    for (uint64_t i = 0; i < numel; ++i) {
        expected[i] = static_cast<Residual>(tricky_value(random, static_cast<double>(levels.quantum), false));
        if (!std::isfinite(expected[i])) expected[i] = 0;
    }
    // Aligned to sixteen bytes, as a residual on a device.
    std::vector<Residual> memory(numel + 4);
    Residual* residual = memory.data();
    while (reinterpret_cast<uintptr_t>(residual) % 16 != 0) ++residual;
    std::copy(expected, expected + numel, residual);

    EncodeOptions options;
    options.threshold = threshold;
    options.rounding_point = rounding_point;
    options.key = 3;
    options.step = 77;
    options.flags = kFlagShakeUp;
    options.skip_nonfinite = skip;
    EmulatedEncoder emulated(numel, backwards);
    emulated.extract(residual, update, levels);
    const Bytes bytes = emulated.encode({threshold, options.flags, options.key, options.step}, skip);
    try {
        const Encoded encoded = encoder.encode(update, options);
        CHECK_EQUAL(encoded.skipped, emulated.nonfinite.count);
        CHECK(exactly(encoded.messages[0].bytes.get(), encoded.messages[0].size) == bytes);
        CHECK_EQUAL(emulated.plan.restores, 0U);
        CHECK(numel == 0 || std::memcmp(residual, expected, numel * sizeof(Residual)) == 0);
    } catch (const NonFiniteUpdate& error) {
        CHECK_EQUAL(error.count, emulated.nonfinite.count);
        CHECK_EQUAL(error.first_index, emulated.nonfinite.first);
        CHECK_EQUAL(emulated.plan.restores, 1U);
        CHECK_EQUAL(parse(bytes).header.count, 0U);
        for (uint64_t tile = 0; tile < emulated.masks().tile_count(); ++tile)
            cuda::restore_tile(emulated.masks(), residual, levels.quantum, tile);
        CHECK(numel == 0 || std::memcmp(residual, expected, numel * sizeof(Residual)) == 0);
    }
}

template <class Residual>
void check_update(const std::vector<UpdateArray>* arrays, uint64_t numel, uint16_t threshold, bool skip, uint64_t seed,
                  bool backwards) {
    for (const double rounding_point : {1.0, 0.5625})
        check_update<Residual>(arrays, numel, threshold, skip, seed, backwards, rounding_point);
}

std::vector<UpdateArray> tricky_arrays(const std::vector<uint64_t>& numels, const std::vector<Dtype>& dtypes,
                                       const std::vector<uint64_t>& offsets, bool nonfinite, uint64_t seed) {
    Random random(seed);
    std::vector<UpdateArray> arrays;
    for (size_t a = 0; a < numels.size(); ++a) {
        arrays.emplace_back(numels[a], dtypes[a % dtypes.size()], offsets[a % offsets.size()]);
        for (uint64_t i = 0; i < numels[a]; ++i) {
            const double value = tricky_value(random, 0.5, nonfinite && random.chance(0.01));
            arrays.back().set(i, std::isfinite(value) || nonfinite ? value : 0.125);
        }
    }
    return arrays;
}

template <class Residual>
std::vector<Dtype> updates_for() {
    std::vector<Dtype> dtypes{Dtype::kFloat32, Dtype::kFloat16, Dtype::kBfloat16};
    if (sizeof(Residual) == 8) dtypes.push_back(Dtype::kFloat64);
    return dtypes;
}

}  // namespace

CASE(every_pattern_gives_the_bytes_of_the_cpu) {
    in_both_orders([](bool backwards) {
        for (const uint64_t numel : Numbers{0, 1, 2, 63, 64, 65, 700, 2048, 2049, 16383, 16384, 16385, 50021}) {
            const check::Note note("numel", numel);
            Random random(numel + 1);
            patterns::for_every_pattern(numel, random, [&](const Entries& e) { check_entries(e, backwards); });
        }
    });
}

CASE(counts_around_multiples_of_the_chunk_size_give_the_bytes_of_the_cpu) {
    for (const uint64_t changed : Numbers{255, 256, 257, 511, 512, 513, 4096, 4097, 16384, 16385, 16896})
        for (const uint64_t farthest : Numbers{0, 1, 3, 20, 300})
            for (const uint64_t behind : Numbers{0, 1, 1000}) {
                const check::Note notes[] = {{"changed", changed}, {"farthest", farthest}, {"behind", behind}};
                Random random(changed + farthest + behind);
                check_entries(patterns::with_count(changed, farthest, behind, random), changed % 2 == 0);
            }
}

CASE(chunks_that_span_many_rounds_of_units_give_the_bytes_of_the_cpu) {
    // 300 changed elements over five million: units of 256 words, and more of them than threads.
    for (const double density : {2e-5, 6e-5, 1e-3}) {
        Random random(9);
        check_entries(patterns::at_density(uint64_t{5} << 20, density, random), false);
    }
    Random random(10);
    Entries ends;  // the first and the last elements of a chunk only
    for (uint64_t i = 0; i < 300; ++i) ends.add(i < 255 ? i : 4000000 + i, random.chance(0.5));
    ends.numel = uint64_t{9} << 19;
    in_both_orders([&](bool backwards) { check_entries(ends, backwards); });
}

CASE(more_chunks_than_threads_give_the_bytes_of_the_cpu) {
    for (const double density : {0.25, 0.9}) {
        Random random(12);
        const Entries entries = patterns::at_density(uint64_t{1} << 22, density, random);
        const uint64_t per_chunk = uint64_t{1} << chunk_exponent(entries.positions.size());
        CHECK(entries.positions.size() / per_chunk > 256 || density < 0.5);
        check_entries(entries, density < 0.5);
    }
}

CASE(any_update_gives_the_bytes_and_the_residual_of_the_cpu) {
    in_both_orders([](bool backwards) {
        const auto check_all = [&](auto zero) {
            using Residual = decltype(zero);
            for (const Dtype dtype : updates_for<Residual>())
                for (const uint64_t numel : Numbers{1, 3, 64, 2047, 2048, 2049, 5000, 20000})
                    for (const uint64_t offset : Numbers{0, 1, 2, 4}) {
                        const check::Note notes[] = {
                            {"update dtype", unsigned(dtype)}, {"numel", numel}, {"offset", offset}};
                        const auto arrays = tricky_arrays({numel}, {dtype}, {offset}, false, numel + offset);
                        check_update<Residual>(&arrays, numel, 0x3f00, false, numel, backwards);
                    }
        };
        check_all(0.0F);
        check_all(0.0);
    });
}

CASE(an_accumulated_residual_gives_the_bytes_of_the_cpu) {
    in_both_orders([](bool backwards) {
        for (const uint64_t numel : Numbers{1, 64, 2047, 2048, 6000, 40000}) {
            check_update<float>(nullptr, numel, 0x3f00, false, numel, backwards);
            check_update<double>(nullptr, numel, 0x3aff, false, numel, backwards);
        }
    });
}

CASE(extreme_thresholds_give_the_residual_of_the_cpu) {
    for (const uint16_t threshold : {uint16_t{0x0001}, uint16_t{0x3aff}, uint16_t{0x7f7f}}) {
        const auto arrays = tricky_arrays({5003}, {Dtype::kFloat32}, {0}, false, threshold);
        check_update<float>(&arrays, 5003, threshold, true, threshold, false);
        check_update<double>(&arrays, 5003, threshold, true, threshold, false);
    }
}

CASE(a_sequence_of_arrays_of_any_dtypes_gives_the_bytes_of_the_cpu) {
    in_both_orders([](bool backwards) {
        for (uint64_t seed = 1; seed < 12; ++seed) {
            Random random(seed);
            std::vector<uint64_t> numels, offsets;
            uint64_t numel = 0;
            for (unsigned i = 0; i < 40; ++i) {
                numels.push_back(random.chance(0.2) ? 0 : random.below(seed % 3 == 0 ? 9000 : 700) + 1);
                offsets.push_back(random.below(5));
                numel += numels.back();
            }
            const auto narrow = tricky_arrays(numels, updates_for<float>(), offsets, false, seed);
            check_update<float>(&narrow, numel, 0x3f00, false, seed, backwards);
            const auto wide = tricky_arrays(numels, updates_for<double>(), offsets, false, seed);
            check_update<double>(&wide, numel, 0x3f00, false, seed, backwards);
            // Aligned arrays of one type, whose tiles are loaded four elements at a time.
            for (uint64_t& one : numels) one = one * 64 + 2048;
            numel = 0;
            for (const uint64_t one : numels) numel += one;
            const auto aligned = tricky_arrays(numels, {Dtype::kBfloat16}, {0}, false, seed);
            if (seed < 3) check_update<float>(&aligned, numel, 0x3f00, false, seed, backwards);
        }
    });
}

CASE(more_arrays_than_a_launch_takes_are_cut_into_launches_or_refused) {
    std::vector<uint64_t> numels(700, 130);
    const auto arrays = tricky_arrays(numels, {Dtype::kFloat32}, {0}, false, 1);
    check_update<float>(&arrays, 700 * 130, 0x3f00, false, 1, false);
    std::vector<ConstArray> tiny(20000, ConstArray{nullptr, 1, Dtype::kFloat32});
    CHECK_THROWS(cuda::TooManyArrays, cuda::cut_ranges(tiny, 20000, cuda::kGroupElements));
}

CASE(nonfinite_elements_are_left_out_or_nothing_is_extracted) {
    in_both_orders([](bool backwards) {
        for (const bool skip : {false, true})
            for (const uint64_t numel : Numbers{1, 64, 2048, 5000, 33000})
                for (uint64_t seed = 1; seed < 4; ++seed) {
                    const auto arrays = tricky_arrays({numel}, {Dtype::kFloat32}, {seed % 2}, true, seed);
                    check_update<float>(&arrays, numel, 0x3f00, skip, seed, backwards);
                    check_update<double>(&arrays, numel, 0x3f00, skip, seed, backwards);
                }
    });
}

CASE(the_parallel_checksum_is_crc_32c) {
    Random random(4);
    for (const uint64_t size : Numbers{48, 49, 255, 256, 257, 300, 511, 512, 1000, 65536, 70001, 300000}) {
        const check::Note note("size", size);
        Bytes bytes(size);
        for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random.next());
        for (unsigned i = 0; i < 4; ++i) bytes[kCrcAt + i] = 0;
        const uint32_t expected = ~kernels().crc32c(~uint32_t{0}, bytes.data(), size);
        bytes[kCrcAt] = 0x55;  // taken as zero
        in_both_orders([&](bool backwards) { CHECK_EQUAL(emulated_crc(bytes.data(), size, backwards), expected); });
    }
}

CASE(no_message_has_more_chunks_than_there_are_records) {
    for (uint64_t numel = 1; numel <= kMaxNumel; numel = numel * 2 + (numel % 3 == 0)) {
        const uint64_t most = cuda::most_chunks(numel);
        for (uint64_t count = 1; count <= numel; count = count * 2 > numel && count < numel ? numel : count * 2) {
            const uint64_t per_chunk = uint64_t{1} << chunk_exponent(count);
            CHECK((count + per_chunk - 1) / per_chunk <= most);
        }
    }
}
