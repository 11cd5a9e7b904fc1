// Pass 1 around the kernels: arrays, threads and non-finite values.
#include "encoder.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <limits>

#include "apply.h"
#include "array_cursor.h"
#include "common/error.h"
#include "common/sample_group.h"
#include "dense.h"
#include "parallel.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace gradwire {
namespace {

constexpr uint64_t kWordsPerThread = 4096;  // 2^18 elements: fewer do not repay the start of a thread
constexpr uint64_t kWordsInCache = 16;      // a difference of so many words is in the first cache when it is read
constexpr uint64_t kHugePage = uint64_t{2} << 20;

// Return zero-filled memory, aligned to 64 bytes, in huge pages where the system has them.
Memory<uint8_t> allocate_zeroed(uint64_t bytes) {
    const uint64_t alignment = bytes >= 2 * kHugePage ? kHugePage : 64;
    const uint64_t rounded = std::max(alignment, (bytes + alignment - 1) / alignment * alignment);
    auto* memory = static_cast<uint8_t*>(std::aligned_alloc(alignment, rounded));
    if (!memory) throw std::bad_alloc();
#if defined(__linux__)
    if (alignment == kHugePage) madvise(memory, rounded, MADV_HUGEPAGE);
#endif
    std::memset(memory, 0, rounded);
    return Memory<uint8_t>(memory);
}

template <class Residual, class Value>
void subtract(const void* now, const void* before, uint64_t count, Residual* out) {
    const auto* minuend = static_cast<const Value*>(now);
    const auto* subtrahend = static_cast<const Value*>(before);
    for (uint64_t i = 0; i < count; ++i) out[i] = static_cast<Residual>(minuend[i] - subtrahend[i]);
}

// Write the next `count` elements of a difference.
template <class Residual>
void subtract_next(ArrayCursor& now, ArrayCursor& before, uint64_t count, Residual* out) {
    while (count > 0) {
        const uint64_t some = std::min({now.left(), before.left(), count});
        const auto function = now.dtype() == Dtype::kFloat64 ? subtract<Residual, double> : subtract<Residual, float>;
        function(now.data(), before.data(), some, out);
        now.advance(some);
        before.advance(some);
        out += some;
        count -= some;
    }
}

// Reads a difference here and there, from its first element on.
class DifferenceCursor {
  public:
    explicit DifferenceCursor(const Input& input) : now_(input.update, 0), before_(input.before, 0) {}
    // `at` is not before what was read last.
    template <class Residual>
    void read(uint64_t at, uint64_t count, Residual* out) {
        now_.advance(at - position_);
        before_.advance(at - position_);
        subtract_next(now_, before_, count, out);
        position_ = at + count;
    }

  private:
    ArrayCursor now_;
    ArrayCursor before_;
    uint64_t position_ = 0;
};

// Count the values that are not finite; `index` is that of the first value.
template <class Value>
void count_nonfinite(const Value* values, uint64_t count, uint64_t index, Extracted& extracted) {
    bool all = true;
    for (uint64_t i = 0; i < count; ++i) all &= is_finite(values[i]);
    for (uint64_t i = 0; !all && i < count; ++i)
        if (!is_finite(values[i]) && extracted.nonfinite++ == 0) extracted.first_nonfinite = index + i;
}

// Call f(list, word of its part, begin, end) for the runs of elements [begin, end) that belong to one part.
template <class PartLists, class F>
void for_runs(const Partition& partition, uint64_t begin, uint64_t end, PartLists& lists, F f) {
    while (begin < end) {
        const uint64_t block = begin >> partition.exponent;
        const uint64_t part = block % partition.parts;
        const uint64_t stop = std::min(end, (block + 1) << partition.exponent);
        f(lists[part], numel_before({partition, part}, begin) / 64, begin, stop);
        begin = stop;
    }
}

}  // namespace

Encoder::Encoder(uint64_t numel, Dtype dtype, unsigned threads) : Encoder(nullptr, numel, dtype, threads) {
    keep_residual();
}

Encoder::Encoder(void* residual, uint64_t numel, Dtype dtype, unsigned threads)
    : numel_(numel), dtype_(dtype), threads_(threads), residual_(residual) {}

void Encoder::keep_residual() {
    if (residual_) return;
    own_ = allocate_zeroed(numel_ * bytes_per_element(dtype_));
    residual_ = own_.get();
}

void Encoder::drop_residual() {
    own_.reset();
    residual_ = nullptr;
}

unsigned Encoder::threads_for(uint64_t words) const {
    return static_cast<unsigned>(std::clamp<uint64_t>(words / kWordsPerThread, 1, threads_));
}

template <class F>
unsigned Encoder::for_words(F f) const {
    const uint64_t words = (numel_ + 63) / 64;
    const unsigned threads = threads_for(words);
    run_parts(words, threads, f);
    return threads;
}

// The kernel reads whole words in place. A word in two arrays, or an incomplete last word, is gathered in a buffer
// first.
template <class Residual>
void Encoder::extract_range(Residual* residual, const std::vector<ConstArray>* update, Levels<Residual> levels,
                            const Partition& partition, uint64_t from_word, uint64_t to_word, PartLists& lists) {
    const uint64_t begin = from_word * 64;
    ArrayCursor cursor(update, begin);
    const auto extract = [](Dtype dtype) { return value_kernels<Residual>().extract[static_cast<unsigned>(dtype)]; };
    const uint64_t end = std::min(to_word * 64, numel_);
    for_runs(partition, begin, end, lists, [&](PartList& list, uint64_t word, uint64_t at, uint64_t stop) {
        while (at < stop) {
            const uint64_t whole = (update ? std::min(cursor.left(), stop - at) : stop - at) / 64;
            if (whole > 0) {
                extract(update ? cursor.dtype() : Dtype::kNone)(residual + (at - begin),
                                                                update ? cursor.data() : nullptr, whole, levels, word,
                                                                list.words, &list.extracted);
                if (update) cursor.advance(whole * 64);
                at += whole * 64;
                word += whole;
                continue;
            }
            const uint64_t some = std::min<uint64_t>(64, stop - at);
            Residual values[64] = {};
            Residual updates[64] = {};
            std::memcpy(values, residual + (at - begin), some * sizeof(Residual));
            if (update) cursor.gather(some, updates);
            extract(update ? kDtypeOf<Residual> : Dtype::kNone)(values, updates, 1, levels, word++, list.words,
                                                                &list.extracted);
            std::memcpy(residual + (at - begin), values, some * sizeof(Residual));
            at += some;
        }
    });
}

// Without a residual the kernel reads whole words in place. Otherwise the difference is written first: into the
// residual, or a few words at a time into a buffer.
template <class Residual>
void Encoder::extract_difference(const Input& input, Levels<Residual> levels, const Partition& partition,
                                 uint64_t from_word, uint64_t to_word, PartLists& lists) {
    auto* const residual = static_cast<Residual*>(residual_);
    Residual in_cache[kWordsInCache * 64];
    ArrayCursor now(input.update, from_word * 64);
    ArrayCursor before(input.before, from_word * 64);
    const auto extract = value_kernels<Residual>().extract_difference;
    for (uint64_t word = from_word; word < to_word;) {
        if (!residual && now.in_place<Residual>(64) && before.in_place<Residual>(64)) {
            const uint64_t stop = std::min({word + now.left() / 64, word + before.left() / 64, to_word});
            for_runs(partition, word * 64, stop * 64, lists,
                     [&](PartList& list, uint64_t first_word, uint64_t begin, uint64_t end) {
                         extract(now.in_place<Residual>(64), before.in_place<Residual>(64), (end - begin) / 64, levels,
                                 first_word, list.words, &list.extracted);
                         now.advance(end - begin);
                         before.advance(end - begin);
                     });
            word = stop;
            continue;
        }
        const uint64_t end = std::min(word + kWordsInCache, to_word);
        Residual* const values = residual ? residual + word * 64 : in_cache;
        subtract_next(now, before, std::min(end * 64, numel_) - word * 64, values);
        extract_range<Residual>(values, nullptr, levels, partition, word, end, lists);
        word = end;
    }
}

template <class Residual>
Encoder::PartLists Encoder::extract(const Input& input, Levels<Residual> levels, const Partition& partition) {
    MaskWord* const words = words_.reserve((numel_ + 63) / 64);
    // Every thread has a place in every part's list, as the part's words before it need at most.
    const auto lists_from = [&](uint64_t word) {
        PartLists lists(partition.parts);
        MaskWord* begin = words;
        for (uint64_t p = 0; p < partition.parts; ++p) {
            lists[p].words = begin + numel_before({partition, p}, word * 64) / 64;
            begin += (numel_of({partition, p}) + 63) / 64;
        }
        return lists;
    };
    std::vector<PartLists> threads(threads_);
    const unsigned count = for_words([&](unsigned i, uint64_t from_word, uint64_t to_word) {
        threads[i] = lists_from(from_word);
        if (input.before) return extract_difference(input, levels, partition, from_word, to_word, threads[i]);
        extract_range(static_cast<Residual*>(residual_) + from_word * 64, input.update, levels, partition, from_word,
                      to_word, threads[i]);
    });
    PartLists& all = threads[0];
    for (unsigned i = 1; i < count; ++i)
        for (uint64_t p = 0; p < partition.parts; ++p) {
            Extracted& joined = all[p].extracted;
            const Extracted& one = threads[i][p].extracted;
            std::memmove(all[p].words + joined.words, threads[i][p].words, one.words * sizeof(MaskWord));
            joined.words += one.words;
            joined.count += one.count;
            joined.nonfinite += one.nonfinite;
            joined.first_nonfinite = std::min(joined.first_nonfinite, one.first_nonfinite);
        }
    return std::move(all);
}

namespace {

// Return the totals of all parts, with the first non-finite element as an index of the whole.
template <class PartLists>
Extracted total(const PartLists& lists, const Partition& partition) {
    Extracted all;
    for (uint64_t p = 0; p < partition.parts; ++p) {
        const Extracted& one = lists[p].extracted;
        all.words += one.words;
        all.count += one.count;
        all.nonfinite += one.nonfinite;
        if (one.nonfinite > 0)
            all.first_nonfinite = std::min(all.first_nonfinite, element_of_whole({partition, p}, one.first_nonfinite));
    }
    return all;
}

}  // namespace

template <class Residual, class F>
void Encoder::for_listed_words(const Input& input, const PartLists& lists, const Partition& partition, F f) {
    auto* const residual = static_cast<Residual*>(residual_);
    for (uint64_t p = 0; p < partition.parts; ++p) {
        DifferenceCursor difference(input);
        for (uint64_t w = 0, words = lists[p].extracted.words; w < words; ++w) {
            const MaskWord word = lists[p].words[w];
            const uint64_t at = element_of_whole({partition, p}, word.index * 64);
            const uint64_t count = std::min<uint64_t>(64, numel_ - at);
            if (residual && count == 64) {
                f(p, word, residual + at);
                continue;
            }
            Residual values[64] = {};
            if (residual)
                std::memcpy(values, residual + at, count * sizeof(Residual));
            else
                difference.read(at, count, values);
            f(p, word, values);
            if (residual) std::memcpy(residual + at, values, count * sizeof(Residual));
        }
    }
}

// Undo `extract`. Extraction goes on after the first non-finite element and all of it is undone, so that the residual
// does not depend on the order of the threads.
template <class Residual>
void Encoder::restore(const Input& input, const PartLists& lists, Residual quantum, const Partition& partition) {
    if (!residual_) return;
    const auto add_to_word = value_kernels<Residual>().add_to_word;
    for_listed_words<Residual>(input, lists, partition, [&](uint64_t, const MaskWord& word, Residual* values) {
        add_to_word(values, word.changed, word.negative, quantum);
    });
}

template <class Residual>
uint16_t Encoder::keep_largest(const Input& input, PartLists& lists, Levels<Residual> used,
                               const EncodeOptions& options, const Partition& partition) {
    const ValueKernels<Residual>& kernels = value_kernels<Residual>();
    const Residual taken = residual_ ? used.quantum : Residual{0};  // from the values that are read first
    const auto value_of = [](unsigned bits) {
        return static_cast<Residual>(bfloat16_to_float(static_cast<uint16_t>(bits)));
    };
    const uint64_t most = options.most_changed;
    std::vector<Extracted> kept(partition.parts);  // allocated before anything changes

    // Guess the threshold from some words.
    const Extracted all = total(lists, partition);
    const uint64_t stride = all.words / std::clamp<uint64_t>(all.words / 64, 16, 64) + 1;
    std::vector<uint16_t> sample;
    uint64_t number = 0;
    for_listed_words<Residual>(input, lists, partition, [&](uint64_t, const MaskWord& word, const Residual* values) {
        if (number++ % stride != 0) return;
        for (uint64_t bits = word.changed; bits != 0; bits &= bits - 1) {
            const Residual value = values[__builtin_ctzll(bits)];
            const bool negative = (word.negative & bits & (~bits + 1)) != 0;
            sample.push_back(static_cast<uint16_t>(magnitude_bin(value + (negative ? -taken : taken))));
        }
    });
    const double share = static_cast<double>(most) / static_cast<double>(all.count);
    const auto rank = static_cast<std::ptrdiff_t>(share * static_cast<double>(sample.size()));
    std::nth_element(sample.begin(), sample.begin() + rank, sample.end(), std::greater<>());
    const unsigned guess = sample[static_cast<size_t>(rank)];

    // Find the bin of which not all elements are sent, in [low, high), and put the elements back on the way. Mostly the
    // bins around the guess have it.
    constexpr unsigned kBelow = 20;
    unsigned low = magnitude_bin(used.bound), high = kInfinityBin, found = kCountedBins;
    uint64_t above = 0;
    for (bool first = true; found >= kCountedBins - 1; first = false) {
        unsigned from = high - low < kCountedBins ? low : low + (high - low) / 2;
        if (first) from = guess > low + kBelow ? guess - kBelow : low;
        uint64_t counts[kCountedBins] = {};
        for_listed_words<Residual>(input, lists, partition, [&](uint64_t, const MaskWord& word, Residual* values) {
            if (first && residual_) kernels.add_to_word(values, word.changed, word.negative, used.quantum);
            kernels.count_bins(values, word.changed, from, counts);
        });
        above = 0;
        for (found = kCountedBins; found-- > 0 && above + counts[found] <= most;) above += counts[found];
        if (found > kCountedBins)  // fewer elements reach the first bin
            high = from;
        else
            low = from + found;
    }

    uint64_t ties = most - above;
    const uint16_t threshold = threshold_from(low, options.rounding_point);
    const Levels<Residual> raised{value_of(low), value_of(threshold)};
    const Residual next = value_of(low + 1);
    for_listed_words<Residual>(input, lists, partition, [&](uint64_t p, const MaskWord& word, Residual* values) {
        const MaskWord one = kernels.keep_word(values, word, raised, next, &ties);
        lists[p].words[kept[p].words] = one;
        kept[p].words += one.changed != 0;
        kept[p].count += static_cast<unsigned>(__builtin_popcountll(one.changed));
    });
    for (uint64_t p = 0; p < partition.parts; ++p) lists[p].extracted = kept[p];
    return threshold;
}

void Encoder::write_messages(const PartLists& lists, const EncodeOptions& options, uint16_t threshold,
                             const Partition& partition, std::vector<MessageBytes>& messages) {
    const unsigned threads = threads_for(total(lists, partition).words * 4);
    const auto at_once = static_cast<unsigned>(std::min<uint64_t>(threads, partition.parts));
    if (ternary_.size() < at_once) ternary_.resize(at_once);
    messages.resize(partition.parts);
    run_parts(partition.parts, at_once, [&](unsigned t, uint64_t begin, uint64_t end) {
        Header header;
        header.flags = options.flags;
        header.threshold = threshold;
        header.key = options.key;
        header.step = options.step;
        for (uint64_t p = begin; p < end; ++p) {
            header.numel = numel_of({partition, p});
            const Extracted& extracted = lists[p].extracted;
            messages[p] =
                ternary_[t].encode(lists[p].words, extracted.words, extracted.count, header, threads / at_once);
        }
    });
}

uint64_t Encoder::least_bytes(const PartLists& lists, const Partition& partition) {
    uint64_t bytes = 0;
    for (uint64_t p = 0; p < partition.parts; ++p) {
        const Extracted& extracted = lists[p].extracted;
        bytes +=
            TernaryEncoder::least_bytes(lists[p].words, extracted.words, extracted.count, numel_of({partition, p}));
    }
    return bytes;
}

template <class Residual>
Encoded Encoder::encode_as(const Input& input, const EncodeOptions& options, const Partition& partition) {
    const auto levels = levels_of<Residual>(options.threshold, options.rounding_point);
    PartLists lists = extract<Residual>(input, levels, partition);
    const Extracted all = total(lists, partition);
    if (all.nonfinite > 0 && !options.skip_nonfinite) {
        restore(input, lists, levels.quantum, partition);
        throw NonFiniteUpdate(all.nonfinite, all.first_nonfinite);
    }
    Encoded encoded;
    encoded.skipped = all.nonfinite;
    encoded.reached = all.count;
    const bool fits = all.count <= options.most_changed;
    Residual taken = levels.quantum;
    try {
        if (fits || least_bytes(lists, partition) <= options.max_bytes) {
            write_messages(lists, options, options.threshold, partition, encoded.messages);
            uint64_t bytes = 0;
            for (const MessageBytes& message : encoded.messages) bytes += message.size;
            if (fits || bytes <= options.max_bytes) return encoded;
        }
        const uint16_t raised = keep_largest<Residual>(input, lists, levels, options, partition);
        taken = static_cast<Residual>(bfloat16_to_float(raised));
        write_messages(lists, options, raised, partition, encoded.messages);
        return encoded;
    } catch (...) {  // no memory for the messages, so nothing is sent
        restore(input, lists, taken, partition);
        throw;
    }
}

SampledQuantiles Encoder::sample(const Input& input, uint16_t threshold, double rounding_point, double density,
                                 uint64_t turn) {
    return with_value_of(dtype_, [&](auto zero) {
        using Residual = decltype(zero);
        const auto levels = levels_of<Residual>(threshold, rounding_point);
        if (!input.before)
            return sample_quantiles(static_cast<const Residual*>(residual_), false, numel_, input.update, levels,
                                    density, turn);
        const uint64_t stride = sample_stride(numel_, density);
        DifferenceCursor difference(input);
        std::vector<Residual> values;
        for (uint64_t at = first_sampled(stride, turn); at < numel_; at += stride) {
            values.resize(values.size() + kSampleGroup);
            difference.read(at, std::min(kSampleGroup, numel_ - at), values.data() + (values.size() - kSampleGroup));
        }
        return sample_quantiles<Residual>(values.data(), true, numel_, nullptr, levels, density, turn);
    });
}

Encoded Encoder::encode(const Input& input, const EncodeOptions& options, const Partition& partition) {
    return with_value_of(dtype_, [&](auto zero) { return encode_as<decltype(zero)>(input, options, partition); });
}

template <class Residual>
Extracted Encoder::put_difference(const Input& input, DenseType dtype, const Partition& partition,
                                  std::vector<MessageBytes>& messages) const {
    std::vector<Extracted> threads(threads_);
    for_words([&](unsigned i, uint64_t from_word, uint64_t to_word) {
        Residual in_cache[kWordsInCache * 64];
        DifferenceCursor difference(input);
        const uint64_t last = std::min(to_word * 64, numel_);
        for_runs(partition, from_word * 64, last, messages,
                 [&](MessageBytes& message, uint64_t word, uint64_t begin, uint64_t end) {
                     const uint64_t size = bytes_per_value(dtype);
                     uint8_t* const out = message.bytes.get() + kHeaderBytes + word * 64 * size;
                     for (uint64_t at = begin; at < end; at += kWordsInCache * 64) {
                         const uint64_t count = std::min(end - at, kWordsInCache * 64);
                         difference.read(at, count, in_cache);
                         count_nonfinite(in_cache, count, at, threads[i]);
                         put_dense({in_cache, count, dtype_}, dtype, out + (at - begin) * size);
                     }
                 });
    });
    Extracted all;
    for (const Extracted& each : threads) {
        all.nonfinite += each.nonfinite;
        all.first_nonfinite = std::min(all.first_nonfinite, each.first_nonfinite);
    }
    return all;
}

Encoded Encoder::encode_dense_difference(const Input& input, DenseType dtype, const EncodeOptions& options,
                                         const Partition& partition) const {
    Encoded encoded;
    for (uint64_t p = 0; p < partition.parts; ++p)
        encoded.messages.push_back(allocate_dense(numel_of({partition, p}), dtype, options.key, options.step));
    const Extracted extracted = with_value_of(
        dtype_, [&](auto zero) { return put_difference<decltype(zero)>(input, dtype, partition, encoded.messages); });
    if (extracted.nonfinite > 0) throw NonFiniteUpdate(extracted.nonfinite, extracted.first_nonfinite);
    for (MessageBytes& message : encoded.messages) seal_message(message);
    return encoded;
}

Encoded Encoder::encode_dense(const Input& input, DenseType dtype, const EncodeOptions& options,
                              const Partition& partition) {
    if (!residual_) return encode_dense_difference(input, dtype, options, partition);
    // No finite value passes an infinite threshold, so pass 1 only accumulates and finds the non-finite values.
    const Partition one = undivided(numel_);
    const Extracted extracted = with_value_of(dtype_, [&](auto zero) {
        constexpr auto kEndless = std::numeric_limits<decltype(zero)>::infinity();
        return total(extract<decltype(zero)>(input, {kEndless, kEndless}, one), one);
    });
    if (extracted.nonfinite > 0 && !options.skip_nonfinite)
        throw NonFiniteUpdate(extracted.nonfinite, extracted.first_nonfinite);
    Encoded encoded;
    encoded.skipped = extracted.nonfinite;
    const uint64_t size = bytes_per_element(dtype_);
    for (uint64_t p = 0; p < partition.parts; ++p) {
        const Part part{partition, p};
        std::vector<ConstArray> values;
        for_blocks(part, 0, numel_of(part), [&](uint64_t, uint64_t whole, uint64_t count) {
            values.push_back({static_cast<const uint8_t*>(residual_) + whole * size, count, dtype_});
        });
        encoded.messages.push_back(gradwire::encode_dense(values, dtype, options.key, options.step));
    }
    for (uint64_t p = 0; p < partition.parts; ++p)
        apply_messages({encoded.messages[p].view()}, {{residual_, numel_, dtype_}}, {partition, p}, -1.0, nullptr,
                       threads_);
    return encoded;
}

namespace {

template <class Residual>
Clipped clip_values(Residual* values, uint64_t numel, Residual limit) {
    constexpr uint64_t kBlock = 1024;
    Clipped clipped;
    for (uint64_t begin = 0; begin < numel; begin += kBlock) {
        const uint64_t end = std::min(begin + kBlock, numel);
        bool any = false;
        for (uint64_t i = begin; i < end; ++i) any |= absolute(values[i]) > limit;
        if (!any) continue;
        for (uint64_t i = begin; i < end; ++i) {
            if (!(absolute(values[i]) > limit)) continue;
            const Residual kept = values[i] < 0 ? -limit : limit;
            clipped.sum += static_cast<double>(values[i]) - static_cast<double>(kept);
            ++clipped.count;
            values[i] = kept;
        }
    }
    return clipped;
}

}  // namespace

Clipped Encoder::clip(double limit) {
    return with_value_of(dtype_, [&](auto zero) {
        using Residual = decltype(zero);
        return clip_values(static_cast<Residual*>(residual_), numel_, static_cast<Residual>(limit));
    });
}

}  // namespace gradwire
