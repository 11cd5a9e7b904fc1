// Pass 1 around the kernels: arrays, threads and non-finite values.
#include "encoder.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "apply.h"
#include "array_cursor.h"
#include "common/error.h"
#include "dense.h"
#include "parallel.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace gradwire {
namespace {

constexpr uint64_t kWordsPerThread = 4096;  // 2^18 elements: fewer do not repay the start of a thread
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

}  // namespace

Encoder::Encoder(uint64_t numel, Dtype dtype, unsigned threads)
    : numel_(numel),
      dtype_(dtype),
      threads_(threads),
      own_(allocate_zeroed(numel * bytes_per_element(dtype))),
      residual_(own_.get()) {}

Encoder::Encoder(void* residual, uint64_t numel, Dtype dtype, unsigned threads)
    : numel_(numel), dtype_(dtype), threads_(threads), residual_(residual) {}

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
void Encoder::extract_range(const std::vector<ConstArray>* update, Residual threshold, uint64_t from_word,
                            uint64_t to_word, MaskWord* out, Extracted* extracted) {
    auto* residual = static_cast<Residual*>(residual_);
    const uint64_t end = std::min(to_word * 64, numel_);
    ArrayCursor cursor(update, from_word * 64);
    const auto extract = [](Dtype dtype) { return value_kernels<Residual>().extract[static_cast<unsigned>(dtype)]; };
    uint64_t at = from_word * 64;
    while (at < end) {
        const uint64_t whole = (update ? std::min(cursor.left(), end - at) : end - at) / 64;
        if (whole > 0) {
            extract(update ? cursor.dtype() : Dtype::kNone)(residual + at, update ? cursor.data() : nullptr, whole,
                                                            threshold, at / 64, out, extracted);
            if (update) cursor.advance(whole * 64);
            at += whole * 64;
            continue;
        }
        const uint64_t some = std::min<uint64_t>(64, end - at);
        Residual values[64] = {};
        Residual updates[64] = {};
        std::memcpy(values, residual + at, some * sizeof(Residual));
        if (update) cursor.gather(some, updates);
        extract(update ? kDtypeOf<Residual> : Dtype::kNone)(values, updates, 1, threshold, at / 64, out, extracted);
        std::memcpy(residual + at, values, some * sizeof(Residual));
        at += some;
    }
}

template <class Residual>
Extracted Encoder::extract(const std::vector<ConstArray>* update, Residual threshold) {
    struct Part {
        MaskWord* list = nullptr;
        Extracted extracted;
    };
    MaskWord* list = list_.reserve((numel_ + 63) / 64);
    std::vector<Part> parts(threads_);
    const unsigned count = for_words([&](unsigned i, uint64_t from_word, uint64_t to_word) {
        parts[i].list = list + from_word;
        extract_range(update, threshold, from_word, to_word, parts[i].list, &parts[i].extracted);
    });
    Extracted all = parts[0].extracted;
    for (unsigned i = 1; i < count; ++i) {
        const Extracted& one = parts[i].extracted;
        std::memmove(list + all.words, parts[i].list, one.words * sizeof(MaskWord));
        all.words += one.words;
        all.count += one.count;
        all.nonfinite += one.nonfinite;
        all.first_nonfinite = std::min(all.first_nonfinite, one.first_nonfinite);
    }
    return all;
}

// Undo `extract`. Extraction goes on after the first non-finite element and all of it is undone, so that the residual
// does not depend on the order of the threads.
template <class Residual>
void Encoder::restore(const Extracted& extracted, Residual threshold) {
    auto* residual = static_cast<Residual*>(residual_);
    for (const MaskWord* word = list_.get(); word < list_.get() + extracted.words; ++word)
        for (uint64_t bits = word->changed; bits != 0; bits &= bits - 1) {
            const unsigned i = static_cast<unsigned>(__builtin_ctzll(bits));
            residual[word->index * 64 + i] += word->negative >> i & 1 ? -threshold : threshold;
        }
}

template <class Residual>
Encoded Encoder::encode_as(const std::vector<ConstArray>* update, const EncodeOptions& options) {
    const auto threshold = static_cast<Residual>(bfloat16_to_float(options.threshold));
    Encoded encoded;
    if (options.sample_density > 0)
        encoded.quantiles = sample_quantiles(static_cast<const Residual*>(residual_), numel_, update, threshold,
                                             options.sample_density);
    const Extracted extracted = extract<Residual>(update, threshold);
    if (extracted.nonfinite > 0 && !options.skip_nonfinite) {
        restore(extracted, threshold);
        throw NonFiniteUpdate(extracted.nonfinite, extracted.first_nonfinite);
    }
    encoded.skipped = extracted.nonfinite;
    Header header;
    header.flags = options.flags;
    header.threshold = options.threshold;
    header.key = options.key;
    header.step = options.step;
    header.numel = numel_;
    encoded.message =
        ternary_.encode(list_.get(), extracted.words, extracted.count, header, threads_for(extracted.words * 4));
    return encoded;
}

Encoded Encoder::encode(const std::vector<ConstArray>* update, const EncodeOptions& options) {
    return with_value_of(dtype_, [&](auto zero) { return encode_as<decltype(zero)>(update, options); });
}

Encoded Encoder::encode_dense(const std::vector<ConstArray>* update, DenseType dtype, const EncodeOptions& options) {
    // No finite value passes an infinite threshold, so pass 1 only accumulates and finds the non-finite values.
    const Extracted extracted = with_value_of(
        dtype_, [&](auto zero) { return extract(update, std::numeric_limits<decltype(zero)>::infinity()); });
    if (extracted.nonfinite > 0 && !options.skip_nonfinite)
        throw NonFiniteUpdate(extracted.nonfinite, extracted.first_nonfinite);
    Encoded encoded;
    encoded.skipped = extracted.nonfinite;
    encoded.message = gradwire::encode_dense({residual_, numel_, dtype_}, dtype, options.key, options.step);
    apply_messages({encoded.message.view()}, {{residual_, numel_, dtype_}}, -1.0, nullptr, threads_);
    return encoded;
}

namespace {

template <class Residual, class Value>
void subtract(const void* now, const void* before, uint64_t count, Residual* out) {
    const auto* minuend = static_cast<const Value*>(now);
    const auto* subtrahend = static_cast<const Value*>(before);
    for (uint64_t i = 0; i < count; ++i) out[i] = static_cast<Residual>(minuend[i] - subtrahend[i]);
}

template <class Residual>
void hold_range(const std::vector<ConstArray>& now, const std::vector<ConstArray>& before, uint64_t begin, uint64_t end,
                Residual* residual) {
    ArrayCursor ours(&now, begin);
    ArrayCursor theirs(&before, begin);
    while (begin < end) {
        const uint64_t some = std::min({ours.left(), theirs.left(), end - begin});
        const auto function = ours.dtype() == Dtype::kFloat64 ? subtract<Residual, double> : subtract<Residual, float>;
        function(ours.data(), theirs.data(), some, residual + begin);
        ours.advance(some);
        theirs.advance(some);
        begin += some;
    }
}

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

void Encoder::hold_difference(const std::vector<ConstArray>& now, const std::vector<ConstArray>& before) {
    for_words([&](unsigned, uint64_t from_word, uint64_t to_word) {
        with_value_of(dtype_, [&](auto zero) {
            hold_range(now, before, from_word * 64, std::min(to_word * 64, numel_),
                       static_cast<decltype(zero)*>(residual_));
        });
    });
}

Clipped Encoder::clip(double limit) {
    return with_value_of(dtype_, [&](auto zero) {
        using Residual = decltype(zero);
        return clip_values(static_cast<Residual*>(residual_), numel_, static_cast<Residual>(limit));
    });
}

}  // namespace gradwire
