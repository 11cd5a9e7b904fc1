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

// Pass 1 over `words` times 64 elements: residual += update; compare; residual -= +-threshold; list the words that changed.
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
    uint64_t begin;  // index of the chunk's first element
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

// A place inside a chunk, from which decoding goes on.
struct ChunkCursor {
    Chunk chunk;
    uint64_t listed_done = 0;     // listed elements read
    uint64_t changed_done = 0;    // changed elements handed out
    uint64_t quotient_at = 0;     // next quotient bit, relative to the chunk's
    uint64_t remainder_sum = 0;
    uint64_t position = 0;        // element after the last one handed out, relative to the chunk's begin
    uint64_t listed_position = 0; // inverted: the next unchanged element, if `listed_ready`
    bool listed_ready = false;
    bool done = false;
};
// target[i - first] += +-quantum for the changed elements i in [first, stop) that the cursor has not yet handed out.
// Writes nothing outside of [first, stop), whatever the bytes say.
template <class Target>
using ApplyChunkFunction = void (*)(const uint8_t* stream, uint64_t stream_bytes, ChunkCursor& cursor, Target* target,
                                    uint64_t first, uint64_t stop, Target quantum);

using Crc32cFunction = uint32_t (*)(uint32_t crc, const uint8_t* bytes, uint64_t size);

struct Kernels {
    const char* name;
    TakeFunction<float> take_float[kDtypes];  // by the update's Dtype; null where the pair is not supported
    TakeFunction<double> take_double[kDtypes];
    SkipChangedFunction skip_changed;
    EncodeChunkFunction encode_chunk;
    SumChunkFunction sum_chunk;
    ApplyChunkFunction<float> apply_float;
    ApplyChunkFunction<double> apply_double;
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
