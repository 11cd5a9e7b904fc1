// Fills the table of one instruction set from its vector types.
#pragma once

#include "crc32c.h"
#include "decode_chunk.h"
#include "encode_chunk.h"
#include "tail_group.h"
#include "take.h"

namespace gradwire {
namespace {

// `Isa` names the vector types: Lanes32, Lanes64 and the updates' loads in their widths.
template <class Isa>
constexpr Kernels make_kernels(const char* name) {
    using F = typename Isa::Lanes32;
    using D = typename Isa::Lanes64;
    return {
        name,
        {take_words_accumulated<F>, take_words<F, typename Isa::Float32To32>, nullptr,
         take_words<F, typename Isa::HalfTo32>, take_words<F, typename Isa::Bfloat16To32>},
        {take_words_accumulated<D>, take_words<D, typename Isa::Float32To64>, take_words<D, typename Isa::Float64To64>,
         take_words<D, typename Isa::HalfTo64>, take_words<D, typename Isa::Bfloat16To64>},
        skip_changed,
        encode_chunk,
        sum_chunk,
        list_entries,
        add_entries<float>,
        add_entries<double>,
        add_bitmap<F>,
        add_bitmap<D>,
        measure_group<float>,
        measure_group<double>,
        measure_residuals<float>,
        measure_residuals<double>,
        crc32c};
}

}  // namespace
}  // namespace gradwire
