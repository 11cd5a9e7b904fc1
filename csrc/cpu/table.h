// The table of one instruction set, made from its vector types.
#pragma once

#include "crc32c.h"
#include "decode_chunk.h"
#include "encode_chunk.h"
#include "extract.h"
#include "half_precision.h"
#include "select.h"

namespace gradwire {
namespace {

// `Isa` names the vector types: Lanes32, Lanes64, the loads of updates in both widths, and the rounding to half
// precision.
template <class Isa>
constexpr Kernels make_kernels(const char* name) {
    using F = typename Isa::Lanes32;
    using D = typename Isa::Lanes64;
    return {name,
            {{extract_words_accumulated<F>, extract_words<F, typename Isa::Float32To32>, nullptr,
              extract_words<F, typename Isa::HalfTo32>, extract_words<F, typename Isa::Bfloat16To32>},
             extract_difference<F>,
             add_entries<float>,
             add_bitmap<F>,
             measure_group<float>,
             measure_residuals<float>,
             add_to_word<F>,
             count_bins<F>,
             keep_word<F>},
            {{extract_words_accumulated<D>, extract_words<D, typename Isa::Float32To64>,
              extract_words<D, typename Isa::Float64To64>, extract_words<D, typename Isa::HalfTo64>,
              extract_words<D, typename Isa::Bfloat16To64>},
             extract_difference<D>,
             add_entries<double>,
             add_bitmap<D>,
             measure_group<double>,
             measure_residuals<double>,
             add_to_word<D>,
             count_bins<D>,
             keep_word<D>},
            {nullptr, nullptr, nullptr, add_moved<F, typename Isa::HalfTo32>, add_moved<F, typename Isa::Bfloat16To32>},
            round_bfloat16,
            skip_changed,
            encode_chunk,
            sum_chunk,
            list_entries,
            crc32c};
}

}  // namespace
}  // namespace gradwire
