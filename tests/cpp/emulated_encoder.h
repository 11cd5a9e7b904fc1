// The CUDA encoder's algorithms, kernel by kernel, on teams of emulated threads.
#pragma once

#include <algorithm>
#include <limits>
#include <memory>

#include "cuda/crc.h"
#include "cuda/extract_tile.h"
#include "cuda/layout.h"
#include "cuda/ranges.h"
#include "emulated_team.h"
#include "support.h"

namespace support {

inline const gradwire::cuda::Crc4Tables& crc_tables() {
    static constexpr gradwire::cuda::Crc4Tables kTables = gradwire::make_crc_tables<4>();
    return kTables;
}
inline const gradwire::cuda::ShiftPowers& shift_powers() {
    static constexpr gradwire::cuda::ShiftPowers kPowers = gradwire::cuda::make_shift_powers();
    return kPowers;
}

using Block = EmulatedTeam<256>;

inline uint32_t emulated_crc(const uint8_t* bytes, uint64_t size, bool backwards) {
    using namespace gradwire::cuda;
    constexpr unsigned kBlocks = 3;
    Block block(backwards);
    uint32_t sum = 0;
    for (unsigned i = 0; i < kBlocks; ++i)
        add_slices(block, i, kBlocks, crc_tables(), shift_powers(), {bytes, size}, &sum);
    return finish_crc(crc_tables(), shift_powers(), {bytes, size}, sum);
}

// Return memory filled with garbage, in a heap block of the same size.
template <class T>
std::unique_ptr<T[]> garbage_filled(uint64_t count) {
    std::unique_ptr<T[]> memory(new T[count]);
    std::memset(static_cast<void*>(memory.get()), 0xa5, count * sizeof(T));
    return memory;
}

class EmulatedEncoder {
  public:
    EmulatedEncoder(uint64_t numel, bool backwards) : numel_(numel), backwards_(backwards) {
        using namespace gradwire::cuda;
        masks_.numel = numel;
        tiles_ = garbage_filled<TileRecord>(masks_.tile_count());
        pairs_ = garbage_filled<MaskPair>(masks_.tile_count() * kTileWords);
        group_count_ = garbage_filled<uint32_t>(masks_.group_total());
        group_first_ = garbage_filled<uint64_t>(masks_.group_total() + 1);
        masks_.tiles = tiles_.get();
        masks_.pairs = pairs_.get();
        masks_.group_count = group_count_.get();
        masks_.group_first = group_first_.get();
    }

    template <class Residual>
    void extract(Residual* residual, const std::vector<gradwire::ConstArray>* update,
                 gradwire::Levels<Residual> levels) {
        using namespace gradwire;
        nonfinite = {0, UINT64_MAX};
        if (!update) {
            cuda::ArrayTable none;
            return extract_range<Residual, cuda::Accumulated>(residual, none, levels, 0, numel_);
        }
        for (const cuda::ArrayRange& range : cuda::cut_ranges(*update, numel_, cuda::kGroupElements)) {
            switch (static_cast<Dtype>(range.arrays.dtypes[0])) {
                case Dtype::kFloat32:
                    extract_range<Residual, float>(residual, range.arrays, levels, range.begin, range.end);
                    break;
                case Dtype::kFloat64:
                    extract_range<Residual, double>(residual, range.arrays, levels, range.begin, range.end);
                    break;
                case Dtype::kFloat16:
                    extract_range<Residual, Half>(residual, range.arrays, levels, range.begin, range.end);
                    break;
                case Dtype::kBfloat16:
                    extract_range<Residual, Bfloat16>(residual, range.arrays, levels, range.begin, range.end);
                    break;
                case Dtype::kNone: break;
            }
        }
    }

    Bytes encode(const gradwire::cuda::HeaderWords& words, bool skip_nonfinite) {
        using namespace gradwire::cuda;
        constexpr unsigned kBlocks = 3;
        Block block(backwards_);
        plan_message(block, masks_, nonfinite, skip_nonfinite, &plan);
        CHECK(plan.chunks <= most_chunks(numel_));
        const auto records = garbage_filled<ChunkRecord>(plan.chunks);
        FindShared find;
        for (uint64_t i = 0; i < plan.chunks; ++i) size_chunk(block, masks_, plan, i, records.get(), find);
        // Kernels may write whole words up to the end of the message.
        uint64_t capacity = (gradwire::max_ternary_bytes(numel_) + 3) / 4;
        auto message = garbage_filled<uint32_t>(capacity);
        for (unsigned i = kBlocks; i-- > 0;)
            layout_message(block, i, kBlocks, masks_, words, &plan, records.get(), message.get());
        for (uint64_t i = plan.chunks; i-- > 0;) write_chunk(block, masks_, plan, i, records.get(), message.get());
        auto* bytes = reinterpret_cast<uint8_t*>(message.get());
        const uint64_t size = gradwire::kHeaderBytes + plan.payload_bytes();
        gradwire::put_field(bytes + gradwire::kCrcAt, emulated_crc(bytes, size, backwards_));
        return Bytes(bytes, bytes + size);
    }

    gradwire::cuda::Nonfinite nonfinite{0, UINT64_MAX};
    gradwire::cuda::Plan plan{};
    const gradwire::cuda::Masks& masks() const { return masks_; }

  private:
    template <class Residual, class Update>
    void extract_range(Residual* residual, const gradwire::cuda::ArrayTable& updates, gradwire::Levels<Residual> levels,
                       uint64_t begin, uint64_t end) {
        using namespace gradwire::cuda;
        EmulatedTeam<32> warp(backwards_);
        const ExtractTarget<Residual> to{residual, masks_, &nonfinite};
        for (uint64_t group = begin / kGroupElements; group * kGroupElements < end; ++group) {
            group_count_[group] = 0;
            for (uint64_t tile = group * kGroupTiles; tile < std::min((group + 1) * kGroupTiles, masks_.tile_count());
                 ++tile) {
                TileShared shared;
                group_count_[group] +=
                    extract_tile<EmulatedTeam<32>, Residual, Update>(warp, to, updates, levels, tile, shared);
            }
        }
    }

    uint64_t numel_;
    bool backwards_;
    gradwire::cuda::Masks masks_{};
    std::unique_ptr<gradwire::cuda::TileRecord[]> tiles_;
    std::unique_ptr<gradwire::cuda::MaskPair[]> pairs_;
    std::unique_ptr<uint32_t[]> group_count_;
    std::unique_ptr<uint64_t[]> group_first_;
};

}  // namespace support
