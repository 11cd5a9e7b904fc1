// Float32 copies of parameters in half precision: every table against an oracle that rounds by comparing distances.
#include "half_precision.h"

#include <limits>

#include "support.h"

using namespace gradwire;
using namespace support;

namespace {

constexpr Dtype kHalves[] = {Dtype::kFloat16, Dtype::kBfloat16};

double widened(uint16_t bits, Dtype dtype) { return value_at(&bits, 0, dtype); }

// Return the nearest value of `dtype`; of two the one with an even last bit.
float nearest(float value, Dtype dtype) {
    if (!std::isfinite(value)) return value;
    const double magnitude = std::fabs(static_cast<double>(value));
    uint16_t bits;
    put_value(&bits, 0, dtype, magnitude);  // rounded towards zero
    const double low = widened(bits, dtype);
    const double next = widened(static_cast<uint16_t>(bits + 1), dtype);
    // Beyond the largest value the next one would be as far away as the one before it.
    const double high = std::isfinite(next) ? next : low + (low - widened(static_cast<uint16_t>(bits - 1), dtype));
    const bool is_high = magnitude - low > high - magnitude || (magnitude - low == high - magnitude && bits % 2 == 1);
    return static_cast<float>(std::copysign(is_high ? next : low, static_cast<double>(value)));
}

bool same(float a, float b) {
    return (std::isnan(a) && std::isnan(b)) || bit_cast<uint32_t>(a) == bit_cast<uint32_t>(b);
}

struct Pair {
    UpdateArray params;
    std::vector<float> memory;
    uint64_t offset;

    Pair(uint64_t numel, Dtype dtype, uint64_t first)
        : params(numel, dtype, first), memory(numel + first), offset(first) {
        memory.shrink_to_fit();
    }
    float* copy() { return memory.data() + offset; }
    void set(uint64_t i, uint16_t param, float copied) {
        std::memcpy(static_cast<uint8_t*>(params.data()) + 2 * i, &param, sizeof param);
        copy()[i] = copied;
    }
    HalfArray view() { return {params.data(), copy(), params.numel(), params.dtype()}; }
};

std::vector<float> expected_of(Pair& pair) {
    std::vector<float> expected;
    for (uint64_t i = 0; i < pair.params.numel(); ++i) {
        const float before = pair.copy()[i];
        const float moved = static_cast<float>(pair.params[i]) - nearest(before, pair.params.dtype());
        expected.push_back(before + moved);
    }
    return expected;
}

void check_moved(std::vector<Pair>& pairs, unsigned threads) {
    std::vector<std::vector<float>> expected;
    std::vector<HalfArray> views;
    for (Pair& pair : pairs) {
        expected.push_back(expected_of(pair));
        views.push_back(pair.view());
    }
    add_moved(views, threads);
    for (size_t p = 0; p < pairs.size(); ++p)
        for (uint64_t i = 0; i < expected[p].size(); ++i) {
            const check::Note notes[] = {{"dtype", unsigned(pairs[p].params.dtype())}, {"element", i}};
            CHECK(same(pairs[p].copy()[i], expected[p][i]));
        }
}

// Return a copy that is difficult for a parameter: its value, a value nearby, halfway to the next one, or any bits.
float tricky_copy(Random& random, uint16_t param, Dtype dtype) {
    const auto value = static_cast<float>(widened(param, dtype));
    const auto next = static_cast<float>(widened(static_cast<uint16_t>(param + 1), dtype));
    const float halfway = std::isfinite(next) ? value + (next - value) / 2 : value;
    switch (random.below(6)) {
        case 0: return value;
        case 1: return halfway;
        case 2: return std::nextafter(halfway, 0.0F);
        case 3: return std::nextafter(halfway, std::copysign(std::numeric_limits<float>::max(), halfway));
        case 4: return value * static_cast<float>(0.5 + random.uniform());
        default: return bit_cast<float>(static_cast<uint32_t>(random.next()));
    }
}

Pair random_pair(Random& random, uint64_t numel, Dtype dtype) {
    Pair pair(numel, dtype, random.below(4));
    for (uint64_t i = 0; i < numel; ++i) {
        const auto param = static_cast<uint16_t>(random.next());
        pair.set(i, param, tricky_copy(random, param, dtype));
    }
    return pair;
}

}  // namespace

CASE(every_parameter_beside_difficult_copies_equals_the_oracle) {
    for_every_table([] {
        for (const Dtype dtype : kHalves)
            for (uint64_t seed = 1; seed <= 8; ++seed) {
                const check::Note note("seed", seed);
                Random random(seed);
                std::vector<Pair> pairs;
                pairs.emplace_back(65536, dtype, 1);
                for (uint64_t i = 0; i < 65536; ++i) {
                    const auto param = static_cast<uint16_t>(i);
                    pairs[0].set(i, param, tricky_copy(random, param, dtype));
                }
                check_moved(pairs, 1);
            }
    });
}

CASE(parameters_are_set_to_the_nearest_value_of_their_copies) {
    for_every_table([] {
        for (uint64_t numel = 0; numel <= 200; ++numel) {
            const check::Note note("numel", numel);
            Random random(numel);
            Pair pair = random_pair(random, numel, Dtype::kBfloat16);
            round_copies({pair.view()}, 2);
            for (uint64_t i = 0; i < numel; ++i)
                CHECK(same(static_cast<float>(pair.params[i]), nearest(pair.copy()[i], Dtype::kBfloat16)));
        }
    });
}

CASE(copies_round_at_the_ends_of_the_range) {
    for_every_table([] {
        for (const Dtype dtype : kHalves) {
            const float last = dtype == Dtype::kFloat16 ? 65520.0F : 0x1.ffp127F;  // where infinity is as near
            const float least = dtype == Dtype::kFloat16 ? 0x1p-25F : 0x1p-134F;   // where zero is as near
            const float infinity = std::numeric_limits<float>::infinity();
            std::vector<float> copies;
            for (const float value : {last, least, infinity, std::numeric_limits<float>::quiet_NaN(), 0.0F})
                for (const float towards : {0.0F, value, infinity})
                    for (const float sign : {1.0F, -1.0F}) copies.push_back(sign * std::nextafter(value, towards));
            std::vector<Pair> pairs;
            for (const uint64_t bits :
                 Numbers{0x0000, 0x8000, 0x0001, 0x3c00, 0x7bff, 0x7c00, 0x7f7f, 0x7f80, 0xffff}) {
                const auto param = static_cast<uint16_t>(bits);
                pairs.emplace_back(copies.size(), dtype, 0);
                for (size_t i = 0; i < copies.size(); ++i) pairs.back().set(i, param, copies[i]);
            }
            check_moved(pairs, 1);
        }
    });
}

CASE(every_size_and_alignment_and_number_of_threads_gives_the_same_bits) {
    for_every_table([] {
        Random random(1);
        for (unsigned threads = 1; threads <= 3; ++threads) {
            const check::Note note("threads", threads);
            std::vector<Pair> pairs;
            for (uint64_t numel = 0; numel <= 70; ++numel)
                for (const Dtype dtype : kHalves) pairs.push_back(random_pair(random, numel, dtype));
            check_moved(pairs, threads);
        }
    });
}
