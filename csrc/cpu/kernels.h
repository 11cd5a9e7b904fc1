// The table of hot loops that one instruction set offers, and the choice among the tables.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "../message.h"

namespace gradwire {

// 64 elements of a residual of which at least one is sent: what pass 1 hands to pass 2.
struct MaskWord {
    uint64_t index;     // covers elements 64 * index and on
    uint64_t changed;   // bit i: element i passed the threshold
    uint64_t negative;  // a subset of `changed`
};

// What pass 1 has found so far; a kernel adds to it.
struct Taken {
    uint64_t words = 0;  // mask words written
    uint64_t count = 0;  // elements that passed
    uint64_t nonfinite = 0;
    uint64_t first_nonfinite = UINT64_MAX;  // index in the flat update
};

// The dtype of an array of updates; kNone: the caller has already added them to the residual.
enum class Dtype : uint8_t { kNone = 0, kFloat32 = 1, kFloat64 = 2, kFloat16 = 3, kBfloat16 = 4 };
inline constexpr unsigned kDtypes = 5;

// Pass 1 over `words` times 64 elements: residual += update; compare; residual -= +-threshold; list the words that
// changed.
template <class Residual>
using TakeFunction = void (*)(Residual* residual, const void* update, uint64_t words, Residual threshold,
                              uint64_t first_word, MaskWord* out, Taken* taken);

// A place in the list: the lowest `skip` changed bits of `word` belong to the chunk before.
struct ListPlace {
    const MaskWord* word;
    unsigned skip;
};
// Goes on by `changed` > 0 changed elements; returns the index of the element after the last of them.
using SkipChangedFunction = uint64_t (*)(ListPlace& place, uint64_t changed);

// Pass 2 over one chunk of the list. Streams are written from bit 0 on, in whole words with zeros behind the last bit.
struct ChunkSource {
    ListPlace first;
    const MaskWord* last;  // one beyond the list
    uint64_t begin;        // index of the chunk's first element
    ChunkShape shape;
};
// Up to this k a chunk is coded from its bitmap, byte by byte, otherwise from its list of distances.
inline constexpr unsigned kMostDenseRice = 3;

struct ChunkStreams {
    uint64_t* remainders;
    uint64_t* signs;
    uint64_t* quotients;
    uint64_t* bitmap;  // scratch where k <= kMostDenseRice: a bit per element of the span
};
// Returns the number of quotient bits.
using EncodeChunkFunction = uint64_t (*)(const ChunkSource& source, const ChunkStreams& out);

struct StreamSums {
    uint64_t ones;        // ones among the quotient bits
    uint64_t used_bits;   // quotient bits up to and with the last one
    uint64_t remainders;  // sum of the remainders
};
using SumChunkFunction = StreamSums (*)(const uint8_t* stream, uint64_t stream_bytes, const Chunk& chunk);

// A place in the list of a chunk, from which listing goes on.
struct ChunkCursor {
    Chunk chunk;
    uint64_t listed_done = 0;    // listed elements read
    uint64_t quotient_at = 0;    // next quotient bit, relative to the chunk's first
    uint64_t remainder_sum = 0;  // of the listed elements read
    bool done = false;
};

// An element handed out by a decoder: its distance from the first one asked for in 31 bits, the sign on top.
using Entry = uint32_t;
inline constexpr uint32_t kEntryMinus = uint32_t{1} << 31;
inline constexpr uint64_t kMostEntryDistance = kEntryMinus - 1;

// Writes the chunk's next listed elements in [first, stop) to `out`, at most `room` of them, and returns how many. Sets
// cursor.done at the chunk's end. stop - first <= kMostEntryDistance. Entries of an inverted chunk have no sign; where
// the bytes are not those that were validated, entries may lie anywhere.
using ListEntriesFunction = uint64_t (*)(const uint8_t* stream, uint64_t stream_bytes, ChunkCursor& cursor,
                                         uint64_t first, uint64_t stop, Entry* out, uint64_t room);

// target[entry] += +-quantum for `count` entries, leaving out those beyond `numel`. With `scattered` it asks for the
// memory ahead, of up to kPrefetchAhead readable entries behind the last.
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
// target[i] += +-quantum where bit i of `changed` is set, i < numel; the set bits' signs follow each other in `minus`.
// Returns the number of set bits.
template <class Target>
using AddBitmapFunction = uint64_t (*)(const BitRun& changed, const BitRun& minus, Target* target, uint64_t numel,
                                       Target quantum);

// Sixteen neighbours of the sample by which TargetDensity steers (tail.h): the bits of four magnitudes of each as
// float32 (now, shuffled, next, same), which of them are finite and at least their `cuts` (1 or more), and how many
// residuals agree with their updates in sign. Values behind `count` are zero and exceed nothing.
inline constexpr uint64_t kTailGroup = 16;
inline constexpr unsigned kTailQuantiles = 4;
inline constexpr uint32_t kTailInfinity = 0x7f800000;  // the bits of what no magnitude that counts reaches
struct TailGroup {
    uint32_t bits[kTailQuantiles][kTailGroup];
    uint32_t exceeding[kTailQuantiles];  // bit i: of element i
    uint32_t agreeing;
    uint32_t opposing;
};
template <class Residual>
using MeasureGroupFunction = void (*)(const Residual* before, const Residual* added, uint64_t count, Residual threshold,
                                      bool has_update, const uint32_t* cuts, TailGroup* out);
// The same of a step without an update: only the first magnitude, which the others equal. Counts no signs.
template <class Residual>
using MeasureResidualsFunction = void (*)(const Residual* before, uint64_t count, uint32_t cut, TailGroup* out);

using Crc32cFunction = uint32_t (*)(uint32_t crc, const uint8_t* bytes, uint64_t size);

struct Kernels {
    const char* name;
    TakeFunction<float> take_float[kDtypes];  // by the update's Dtype; null where the pair is not supported
    TakeFunction<double> take_double[kDtypes];
    SkipChangedFunction skip_changed;
    EncodeChunkFunction encode_chunk;
    SumChunkFunction sum_chunk;
    ListEntriesFunction list_entries;
    AddEntriesFunction<float> add_entries_float;
    AddEntriesFunction<double> add_entries_double;
    AddBitmapFunction<float> add_bitmap_float;
    AddBitmapFunction<double> add_bitmap_double;
    MeasureGroupFunction<float> measure_group_float;
    MeasureGroupFunction<double> measure_group_double;
    MeasureResidualsFunction<float> measure_residuals_float;
    MeasureResidualsFunction<double> measure_residuals_double;
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

// The table in use: GRADWIRE_ISA's, otherwise the fastest that this processor runs. Throws BackendUnavailable.
const Kernels& kernels();

// Names of the tables that this processor runs, slowest first.
std::vector<std::string> usable_isas();

// Replaces the table in use, for tests and benchmarks. Throws BackendUnavailable.
void select_isa(const std::string& name);

}  // namespace gradwire
