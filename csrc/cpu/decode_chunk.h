// Decoding kernels. The bytes may have changed after validation, so every read stays inside the stream and every write
// inside the target whatever the bytes are.
//
// The quotient of the i-th listed element ends with the one at bit T of the chunk's quotients. The quotients up to that
// bit sum to T - i, so the element's position is ((T - i) << k) + (sum of the remainders up to element i) + i.
#pragma once

#include "../common/scalars.h"
#include "bits.h"
#include "kernels.h"

namespace gradwire {
namespace {

// Sum packed fields of up to 8 bits: count each of their bits over a whole window at once.
inline uint64_t sum_narrow_fields(const BitSource& source, uint64_t bit, uint64_t windows, unsigned rice) {
    const unsigned per_window = kWindow / rice;
    uint64_t lowest = 0;  // the lowest bit of every field
    for (unsigned field = 0; field < per_window; ++field) lowest |= uint64_t{1} << (field * rice);
    uint64_t sum = 0;
    for (uint64_t i = 0; i < windows; ++i, bit += per_window * rice) {
        const uint64_t window = source.bits_at(bit);
        for (unsigned b = 0; b < rice; ++b) sum += uint64_t{popcount(window >> b & lowest)} << b;
    }
    return sum;
}

// Sum wider fields: add every second field in place, which may overflow into the bits of its neighbour, for up to 2^8
// windows at a time.
inline uint64_t sum_wide_fields(const BitSource& source, uint64_t bit, uint64_t windows, unsigned rice) {
    const unsigned per_window = kWindow / rice;
    uint64_t even_fields = 0;
    for (unsigned field = 0; field < per_window; field += 2) even_fields |= low_bits(rice) << (field * rice);
    const uint64_t odd_fields = even_fields & low_bits((per_window - 1) * rice);
    uint64_t sum = 0;
    for (uint64_t done = 0; done < windows;) {
        const uint64_t stop = windows - done < 256 ? windows : done + 256;
        uint64_t even = 0;
        uint64_t odd = 0;
        for (; done < stop; ++done, bit += per_window * rice) {
            const uint64_t window = source.bits_at(bit);
            even += window & even_fields;
            odd += window >> rice & odd_fields;
        }
        for (unsigned at = 0; at < kWindow; at += 2 * rice)
            sum += (even >> at & low_bits(2 * rice)) + (odd >> at & low_bits(2 * rice));
    }
    return sum;
}

inline uint64_t sum_fields(const BitSource& source, uint64_t bit, uint64_t fields, unsigned rice) {
    const unsigned per_window = kWindow / rice;
    const uint64_t windows = fields / per_window;
    uint64_t sum =
        rice <= 8 ? sum_narrow_fields(source, bit, windows, rice) : sum_wide_fields(source, bit, windows, rice);
    for (uint64_t i = windows * per_window; i < fields; ++i) sum += source.bits_at(bit + i * rice) & low_bits(rice);
    return sum;
}

StreamSums sum_chunk(const uint8_t* stream, uint64_t stream_bytes, const Chunk& chunk) {
    const BitSource source{stream, stream_bytes};
    StreamSums sums{0, 0, 0};
    for (uint64_t at = 0; at < chunk.quotient_bits; at += kWindow) {
        const uint64_t left = chunk.quotient_bits - at;
        const uint64_t window =
            source.bits_at(chunk.quotient_bit + at) & low_bits(left < kWindow ? static_cast<unsigned>(left) : kWindow);
        if (window == 0) continue;
        sums.ones += popcount(window);
        sums.used_bits = at + 64 - leading_zeros(window);
    }
    if (chunk.shape.rice > 0)
        sums.remainders = sum_fields(source, chunk.remainder_bit, chunk.shape.listed, chunk.shape.rice);
    return sums;
}

inline Entry make_entry(uint64_t distance, uint64_t minus) {
    return (static_cast<Entry>(distance) & ~kEntryMinus) | static_cast<Entry>(minus << 31);
}

// Progress inside a chunk: listed elements read, the sum of their remainders, the next quotient bit.
struct ListState {
    uint64_t i;
    uint64_t sum;
    uint64_t at;
};

#if defined(__AVX2__) && defined(__BMI2__)
#define GRADWIRE_LISTS_BYTES 1

// Up to this k the positions in one byte of quotients fit into bytes: 8 * 2^4 + 7 < 256.
inline constexpr unsigned kMostByteRice = 4;

struct QuotientBytes {
    uint64_t sums[256];  // byte j of an entry: the quotients up to the j-th one, within the byte
    constexpr QuotientBytes() : sums() {
        for (unsigned byte = 0; byte < 256; ++byte) {
            unsigned ones = 0;
            for (unsigned bit = 0; bit < 8; ++bit)
                if (byte >> bit & 1) {
                    sums[byte] |= uint64_t{bit - ones} << (8 * ones);
                    ++ones;
                }
        }
    }
};

// List eight positions at a time, in the bytes of a word: quotients from a table, remainders summed by a
// multiplication. End where fewer than eight entries are wanted, `stop` is near, or less than a byte of quotients is
// left.
inline void list_bytes(const BitSource& source, const Chunk& chunk, uint64_t first, uint64_t stop, uint64_t end,
                       Entry* out, ListState& state) {
    static constexpr QuotientBytes kQuotients;
    constexpr uint64_t kEveryByte = 0x0101010101010101;
    const unsigned rice = chunk.shape.rice;
    const uint64_t field_of_byte = kEveryByte * low_bits(rice);
    const uint64_t base = chunk.begin - first;
    const uint64_t begin = state.i;
    const __m256i sign_shifts = _mm256_setr_epi32(31, 30, 29, 28, 27, 26, 25, 24);
    while (state.i + 8 <= end && state.at + 8 <= chunk.quotient_bits) {
        const auto byte = static_cast<uint8_t>(source.bits_at(chunk.quotient_bit + state.at));
        const unsigned ones = popcount(byte);
        const uint64_t fields = source.bits_at(chunk.remainder_bit + state.i * rice);
        const uint64_t remainders = _pdep_u64(fields, field_of_byte) * kEveryByte;
        const uint64_t steps = (kQuotients.sums[byte] << rice) + remainders + 0x0706050403020100;
        const uint64_t from = base + ((state.at - state.i) << rice) + state.sum + state.i;
        if (from + 255 >= stop - first) return;
        const __m256i positions = _mm256_add_epi32(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(static_cast<int64_t>(steps))),
                                                   _mm256_set1_epi32(static_cast<int>(from)));
        const __m256i signs = _mm256_sllv_epi32(
            _mm256_set1_epi32(static_cast<int>(source.bits_at(chunk.sign_bit + state.i))), sign_shifts);
        const __m256i minus = _mm256_set1_epi32(INT32_MIN);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + (state.i - begin)),
                            _mm256_or_si256(_mm256_andnot_si256(minus, positions), _mm256_and_si256(minus, signs)));
        state.sum += ones > 0 ? remainders >> (8 * ones - 8) & 255 : 0;
        state.i += ones;
        state.at += 8;
    }
}

// Up to this k four positions fit into the 16-bit lanes of a word: 56 << 10 plus four remainders.
inline constexpr unsigned kMostFourRice = 10;

// List four positions at a time. End where fewer than four entries are wanted, are in a window, or are before `stop`.
inline void list_fours(const BitSource& source, const Chunk& chunk, uint64_t first, uint64_t stop, uint64_t end,
                       Entry* out, ListState& state) {
    constexpr uint64_t kEveryLane = 0x0001000100010001;
    const unsigned rice = chunk.shape.rice;
    const uint64_t field_of_lane = kEveryLane * low_bits(rice);
    const uint64_t base = chunk.begin - first;
    const uint64_t begin = state.i;
    const __m128i sign_shifts = _mm_setr_epi32(31, 30, 29, 28);
    const __m128i minus = _mm_set1_epi32(INT32_MIN);
    while (state.i + 4 <= end && state.at + kWindow <= chunk.quotient_bits) {
        uint64_t window = source.bits_at(chunk.quotient_bit + state.at) & low_bits(kWindow);
        uint64_t signs = source.bits_at(chunk.sign_bit + state.i);
        unsigned fours = popcount(window) / 4;
        if (fours == 0) return;  // unusually large quotients
        for (; fours > 0 && state.i + 4 <= end; --fours, signs >>= 4, state.i += 4) {
            uint64_t ones = trailing_zeros(window);
            for (unsigned lane = 1; lane < 4; ++lane) {
                window &= window - 1;
                ones |= uint64_t{trailing_zeros(window)} << (16 * lane);
            }
            window &= window - 1;
            const uint64_t fields = source.bits_at(chunk.remainder_bit + state.i * rice);
            const uint64_t remainders = _pdep_u64(fields, field_of_lane) * kEveryLane;
            const uint64_t steps = ((ones - 0x0003000200010000) << rice) + remainders + 0x0003000200010000;
            const uint64_t from = base + ((state.at - state.i) << rice) + state.sum + state.i;
            if (from + (steps >> 48) >= stop - first) {
                state.at += ones & 63;
                return;
            }
            const __m128i positions = _mm_add_epi32(_mm_cvtepu16_epi32(_mm_cvtsi64_si128(static_cast<int64_t>(steps))),
                                                    _mm_set1_epi32(static_cast<int>(from)));
            const __m128i negative = _mm_sllv_epi32(_mm_set1_epi32(static_cast<int>(signs)), sign_shifts);
            _mm_storeu_si128(reinterpret_cast<__m128i*>(out + (state.i - begin)),
                             _mm_or_si128(_mm_andnot_si128(minus, positions), _mm_and_si128(minus, negative)));
            state.sum += remainders >> 48;
        }
        state.at += window != 0 ? trailing_zeros(window) : kWindow;
        if (fours > 0) return;
    }
}

#endif

uint64_t list_entries(const uint8_t* stream, uint64_t stream_bytes, ChunkCursor& cursor, uint64_t first, uint64_t stop,
                      Entry* out, uint64_t capacity) {
    const BitSource source{stream, stream_bytes};
    const Chunk& chunk = cursor.chunk;
    const unsigned rice = chunk.shape.rice;
    const uint64_t mask = low_bits(rice);
    const uint64_t begin = cursor.listed_done;
    const uint64_t end = chunk.shape.listed - begin < capacity ? chunk.shape.listed : begin + capacity;
    ListState state{begin, cursor.remainder_sum, cursor.quotient_at};
#if defined(GRADWIRE_LISTS_BYTES)
    if (rice >= 1 && rice <= kMostByteRice) list_bytes(source, chunk, first, stop, end, out, state);
    if (rice > kMostByteRice && rice <= kMostFourRice) list_fours(source, chunk, first, stop, end, out, state);
#endif
    for (; state.at < chunk.quotient_bits; state.at += kWindow) {
        uint64_t window = source.bits_at(chunk.quotient_bit + state.at) & low_bits(kWindow);
        uint64_t signs = source.bits_at(chunk.sign_bit + state.i);
        for (; window != 0; window &= window - 1, signs >>= 1, ++state.i) {
            const uint64_t one = state.at + trailing_zeros(window);
            const uint64_t next_sum = state.sum + (source.bits_at(chunk.remainder_bit + state.i * rice) & mask);
            const uint64_t position = chunk.begin + ((one - state.i) << rice) + next_sum + state.i;
            if (state.i == end || position >= stop) {
                cursor.listed_done = state.i;
                cursor.remainder_sum = state.sum;
                cursor.quotient_at = one;
                cursor.done = state.i == chunk.shape.listed;
                return state.i - begin;
            }
            out[state.i - begin] = make_entry(position - first, signs & 1);
            state.sum = next_sum;
        }
    }
    cursor.done = true;
    return state.i - begin;
}

// Set the sign by its bit, because a branch on a sign is mispredicted every second time.
inline float with_sign(float quantum, Entry entry) {
    return bit_cast<float>(bit_cast<uint32_t>(quantum) ^ (entry & kEntryMinus));
}
inline double with_sign(double quantum, Entry entry) {
    return bit_cast<double>(bit_cast<uint64_t>(quantum) ^ uint64_t{entry & kEntryMinus} << 32);
}

template <class Target>
inline void add_entry(Entry entry, Target* target, uint64_t numel, Target quantum) {
    const uint64_t at = entry & ~kEntryMinus;
    if (__builtin_expect(at < numel, 1)) target[at] += with_sign(quantum, entry);
}

// Memory traffic per entry: 4 bytes read, and the cache line of its target read and written.
template <class Target>
void add_entries(const Entry* entries, uint64_t count, Target* target, uint64_t numel, Target quantum, bool scattered) {
    // Prefetch into the second-level cache: the first has too few lines in flight (2.0 against 3.4 ms for 16 x 16,777).
    if (scattered)
        for (uint64_t i = 0; i < count; ++i) {
            __builtin_prefetch(target + (entries[i + kPrefetchAhead] & ~kEntryMinus), 0, 1);
            add_entry(entries[i], target, numel, quantum);
        }
    else
        for (uint64_t i = 0; i < count; ++i) {
            prefetch_ahead(target + (entries[i] & ~kEntryMinus));
            add_entry(entries[i], target, numel, quantum);
        }
}

template <class Lanes>
uint64_t add_bitmap(const BitRun& changed, const BitRun& minus, typename Lanes::Scalar* target, uint64_t numel,
                    typename Lanes::Scalar quantum) {
    const BitSource bits{changed.bytes, changed.size};
    const BitSource signs{minus.bytes, minus.size};
    const typename Lanes::Vector q = Lanes::broadcast(quantum);
    uint64_t done = 0;
    for (uint64_t at = 0; at < numel; at += 64) {
        const uint64_t here = numel - at < 64 ? numel - at : 64;
        const uint64_t word = bits.word_at_bit(changed.bit + at) & low_bits(static_cast<unsigned>(here));
        if (word == 0) continue;
        const uint64_t negative = scatter_bits(signs.word_at_bit(minus.bit + done), word);
        done += popcount(word);
        typename Lanes::Scalar* to = target + at;
        if (here < 64) {
            for (uint64_t rest = word; rest != 0; rest &= rest - 1) {
                const unsigned i = trailing_zeros(rest);
                to[i] += negative >> i & 1 ? -quantum : quantum;
            }
            continue;
        }
#pragma GCC unroll 64
        for (unsigned i = 0; i < 64; i += Lanes::kLanes) {
            prefetch_ahead(to + i);
            Lanes::store(to + i, Lanes::add_signed(Lanes::load(to + i), word >> i, negative >> i, q));
        }
    }
    return done;
}

}  // namespace
}  // namespace gradwire
