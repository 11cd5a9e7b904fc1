// The table of hot loops that one instruction set offers, and the choice among the tables.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "../common/arrays.h"
#include "../common/format.h"
#include "../common/sample_group.h"

namespace gradwire {

// 64 elements of a residual of which at least one is sent: the output of pass 1 and the input of pass 2.
struct MaskWord {
    uint64_t index;     // the first element is 64 * index
    uint64_t changed;   // bit i: element i passed the threshold
    uint64_t negative;  // a subset of `changed`
};

// The totals of pass 1; a kernel adds to them.
struct Extracted {
    uint64_t words = 0;  // mask words written
    uint64_t count = 0;  // elements that passed
    uint64_t nonfinite = 0;
    uint64_t first_nonfinite = UINT64_MAX;  // index in the flat update
};

// Pass 1 over `words` times 64 elements: residual += update; compare; residual -= +-quantum; list the words that
// changed.
template <class Residual>
using ExtractFunction = void (*)(Residual* residual, const void* update, uint64_t words, Levels<Residual> levels,
                                 uint64_t first_word, MaskWord* out, Extracted* extracted);

// The same for the difference now - before, which is not kept.
template <class Residual>
using ExtractDifferenceFunction = void (*)(const Residual* now, const Residual* before, uint64_t words,
                                           Levels<Residual> levels, uint64_t first_word, MaskWord* out,
                                           Extracted* extracted);

// A place in the list: the lowest `skip` changed bits of `word` belong to the chunk before.
struct ListPlace {
    const MaskWord* word;
    unsigned skip;
};
// Advance by `changed` > 0 changed elements and return the index of the element after the last of them.
using SkipChangedFunction = uint64_t (*)(ListPlace& place, uint64_t changed);

// Pass 2 over one chunk of the list. Streams are written from bit 0 in whole words, with zeros after the last bit.
struct ChunkSource {
    ListPlace first;
    const MaskWord* last;  // one beyond the list
    uint64_t begin;        // index of the chunk's first element
    ChunkShape shape;
};
// Up to this k a chunk is encoded from its bitmap, byte by byte, otherwise from its list of distances.
inline constexpr unsigned kMostDenseRice = 3;

struct ChunkStreams {
    uint64_t* remainders;
    uint64_t* signs;
    uint64_t* quotients;
    uint64_t* bitmap;  // scratch where k <= kMostDenseRice: a bit per element of the span
};
// Return the number of quotient bits.
using EncodeChunkFunction = uint64_t (*)(const ChunkSource& source, const ChunkStreams& out);

struct StreamSums {
    uint64_t ones;        // ones among the quotient bits
    uint64_t used_bits;   // quotient bits up to and including the last one
    uint64_t remainders;  // sum of the remainders
};
using SumChunkFunction = StreamSums (*)(const uint8_t* stream, uint64_t stream_bytes, const Chunk& chunk);

// A place in the list of a chunk.
struct ChunkCursor {
    Chunk chunk;
    uint64_t listed_done = 0;    // listed elements read
    uint64_t quotient_at = 0;    // next quotient bit, relative to the chunk's first
    uint64_t remainder_sum = 0;  // of the listed elements read
    bool done = false;
};

// A changed element: 31 bits of distance from the first element requested, and the sign in the highest bit.
using Entry = uint32_t;
inline constexpr uint32_t kEntryMinus = uint32_t{1} << 31;
inline constexpr uint64_t kMostEntryDistance = kEntryMinus - 1;

// Write the next listed elements of the chunk in [first, stop) to `out`, at most `capacity` of them, and return their
// number. Set cursor.done at the end of the chunk. stop - first <= kMostEntryDistance. Entries of an inverted chunk
// have no sign. If the bytes changed after validation, entries may have any position.
using ListEntriesFunction = uint64_t (*)(const uint8_t* stream, uint64_t stream_bytes, ChunkCursor& cursor,
                                         uint64_t first, uint64_t stop, Entry* out, uint64_t capacity);

// target[entry] += +-quantum for `count` entries, except those beyond `numel`. With `scattered` the target's memory is
// prefetched, so that kPrefetchAhead entries after the last must be readable.
inline constexpr uint64_t kPrefetchAhead = 96;
template <class Target>
using AddEntriesFunction = void (*)(const Entry* entries, uint64_t count, Target* target, uint64_t numel,
                                    Target quantum, bool scattered);

// A run of bits in memory that ends after `size` bytes.
struct BitRun {
    const uint8_t* bytes;
    uint64_t size;
    uint64_t bit;
};
// target[i] += +-quantum where bit i of `changed` is set, i < numel; `minus` has one bit for each set bit, in order.
// Return the number of set bits.
template <class Target>
using AddBitmapFunction = uint64_t (*)(const BitRun& changed, const BitRun& minus, Target* target, uint64_t numel,
                                       Target quantum);

// Fetch memory that a loop over an array will need. Processors do so by themselves, but only up to the end of a page.
static inline void prefetch_ahead(const void* at) {
    constexpr uint64_t kPageBytes = 4096;
    __builtin_prefetch(static_cast<const uint8_t*>(at) + kPageBytes);
}

// One group of the quantile sample (common/sample_group.h).
template <class Residual>
using MeasureGroupFunction = void (*)(const Residual* before, const Residual* added, uint64_t count,
                                      Levels<Residual> levels, bool has_update, const uint32_t* cuts, SampleGroup* out);
// The same for a step without an update: only the first of the four magnitudes, and no signs.
template <class Residual>
using MeasureResidualsFunction = void (*)(const Residual* before, uint64_t count, uint32_t cut, SampleGroup* out);

// The second pass of a step over its budget of bytes, over 64 elements of the residual at a time.
//
// values[i] += +-quantum where bit i of `changed` is set; `minus` is a subset.
template <class Residual>
using AddToWordFunction = void (*)(Residual* values, uint64_t changed, uint64_t minus, Residual quantum);
// Count the elements of `among` in kCountedBins bins of magnitudes (magnitude_bin) from `first` on; the last one counts
// those above as well.
inline constexpr unsigned kCountedBins = 256;
inline constexpr unsigned kInfinityBin = kInfinityBits >> 16;
template <class Residual>
using CountBinsFunction = void (*)(const Residual* values, uint64_t among, unsigned first, uint64_t* counts);
// Extract +-quantum from the changed elements that reach the bound, but from at most `ties` elements, the first ones,
// whose magnitude is below `next`. Reduce `ties` by their number.
template <class Residual>
using KeepWordFunction = MaskWord (*)(Residual* values, MaskWord word, Levels<Residual> raised, Residual next,
                                      uint64_t* ties);

// copy[i] += params[i] - copy[i], rounded to the type of `params`.
using AddMovedFunction = void (*)(float* copy, const void* params, uint64_t numel);

// params[i] = copy[i], rounded to bfloat16.
using RoundBfloat16Function = void (*)(const float* copy, void* params, uint64_t numel);

using Crc32cFunction = uint32_t (*)(uint32_t crc, const uint8_t* bytes, uint64_t size);

// The kernels of one type of residuals and targets.
template <class Value>
struct ValueKernels {
    ExtractFunction<Value> extract[kDtypes];  // by the update's Dtype; null where the pair is not supported
    ExtractDifferenceFunction<Value> extract_difference;
    AddEntriesFunction<Value> add_entries;
    AddBitmapFunction<Value> add_bitmap;
    MeasureGroupFunction<Value> measure_group;
    MeasureResidualsFunction<Value> measure_residuals;
    AddToWordFunction<Value> add_to_word;
    CountBinsFunction<Value> count_bins;
    KeepWordFunction<Value> keep_word;
};

struct Kernels {
    const char* name;
    ValueKernels<float> float32;
    ValueKernels<double> float64;
    AddMovedFunction add_moved[kDtypes];  // by the Dtype of `params`; null except for half precision
    RoundBfloat16Function round_bfloat16;
    SkipChangedFunction skip_changed;
    EncodeChunkFunction encode_chunk;
    SumChunkFunction sum_chunk;
    ListEntriesFunction list_entries;
    Crc32cFunction crc32c;
};

extern const Kernels kScalarKernels;
#if defined(GRADWIRE_X86)
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
#endif
#if defined(GRADWIRE_ARM)
extern const Kernels kNeonKernels;
#endif

// Return the table in use: the one that GRADWIRE_ISA names, otherwise the fastest that this processor runs. Throw
// BackendUnavailable if GRADWIRE_ISA names another.
const Kernels& kernels();

template <class Value>
const ValueKernels<Value>& value_kernels() {
    if constexpr (sizeof(Value) == 8)
        return kernels().float64;
    else
        return kernels().float32;
}

// Return the names of the tables that this processor runs, slowest first.
std::vector<std::string> usable_isas();

// Replace the table in use, for tests and benchmarks. Throw BackendUnavailable.
void select_isa(const std::string& name);

}  // namespace gradwire
