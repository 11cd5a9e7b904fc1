// The kernels of the encoder and their order. Each kernel is a few lines around an algorithm of the headers.
//
//   kernel     work                                                  memory traffic
//   extract    pass 1 over the data: residual, masks                 12 bytes an element (float32)
//   deal       only for parts: the masks of each                     the listed words
//   plan       one block: a scan of the groups' counts               4 bytes for 16,384 elements
//   size       a block for each chunk: its borders and quotients     the listed words
//   layout     zeros, directory, header                              the message
//   write      a block for each chunk: its bits                      the listed words, the message
//   clip       only in a step that clips                             the data
//   seal       checksum, totals, threshold of the next step          the message
//   publish    only with a pinned copy                               the message, over the bus
//
// With a budget of bytes, kernels between layout and write: weigh, and where the messages are too large put_back,
// choose, count_ties, order_ties, keep_largest; then plan, size and layout again. They return at once where the
// messages fit. The limit of TargetDensity does not depend on bytes: the same kernels are between plan and size.
//
// From deal on, blockIdx.y is the part.
#include "encode_kernels.h"

#include "crc_tables.cuh"
#include "dense.h"
#include "device_team.cuh"
#include "layout.h"
#include "quantile_sample.h"

namespace gradwire::cuda {
namespace {

constexpr unsigned kWarps = kBlock / kWarpThreads;
static_assert(kWarps == kGroupTiles, "a block of warps for each group of tiles");

__device__ const PartWork& own_part(const PartTable& table) { return table.parts[blockIdx.y]; }
__device__ uint64_t part_index(const PartTable& table) { return table.first + blockIdx.y; }

template <class Residual>
__device__ Residual quantum_of(const EncoderState& state) {
    return static_cast<Residual>(bfloat16_to_float(state.used));
}

template <class Residual>
__device__ Residual endless() {
    return static_cast<Residual>(__int_as_float(0x7f800000));
}

// Add up the counts of a group's tiles, of which each warp has one.
__device__ void store_group_count(const Masks& masks, uint64_t group, uint32_t count, uint32_t* counts) {
    if (threadIdx.x % kWarpThreads == 0) counts[threadIdx.x / kWarpThreads] = count;
    __syncthreads();
    if (threadIdx.x > 0) return;
    uint32_t sum = 0;
    for (unsigned i = 0; i < kWarps; ++i) sum += counts[i];
    masks.group_count[group] = sum;
}

// Whether a kernel has nothing to do: launched for steps over their budget, in a step that is not.
__device__ bool is_idle(const Selection* only_over) { return only_over && !only_over->is_over; }

}  // namespace

// Kernels and variables have external linkage: nvcc gives others names that differ from clone to clone.
__device__ CrcWork encode_crc = make_crc_work();

// A warp for each tile. No finite value passes the infinite threshold of `dense`, which therefore only accumulates.
template <class Residual, class Update>
__global__ void __launch_bounds__(kBlock, sizeof(Residual) == 8 ? 3 : 4)
    extract_kernel(const __grid_constant__ ArrayTable updates, ExtractTarget<Residual> to, const EncoderState* state,
                   double rounding_point, uint64_t first_group, bool dense) {
    __shared__ TileShared tiles[kWarps];
    __shared__ uint32_t counts[kWarps];
    const unsigned warp_index = threadIdx.x / kWarpThreads;
    const uint64_t group = first_group + blockIdx.x;
    const uint64_t tile = group * kGroupTiles + warp_index;
    Levels<Residual> levels = levels_of<Residual>(state->used, rounding_point);
    if (dense) levels.bound = endless<Residual>();
    uint32_t count = 0;
    if (tile < to.masks.tile_count()) {
        WarpTeam warp;
        count = extract_tile<WarpTeam, Residual, Update>(warp, to, updates, levels, tile, tiles[warp_index]);
    }
    store_group_count(to.masks, group, count, counts);
}

// A warp for each tile of the parts.
__global__ void __launch_bounds__(kBlock)
    deal_kernel(Masks whole, Partition partition, const __grid_constant__ PartTable table) {
    __shared__ uint32_t counts[kWarps];
    const Masks masks = own_part(table).masks;
    const uint64_t group = blockIdx.x;
    if (group >= masks.group_total()) return;
    const uint64_t tile = group * kGroupTiles + threadIdx.x / kWarpThreads;
    uint32_t count = 0;
    if (tile < masks.tile_count()) {
        WarpTeam warp;
        count = deal_tile(warp, whole, {partition, part_index(table)}, masks, tile);
    }
    store_group_count(masks, group, count, counts);
}

__global__ void __launch_bounds__(kPlanBlock)
    plan_kernel(const __grid_constant__ PartTable table, const EncoderState* state, bool skip_nonfinite,
                StepTotals* totals, const Selection* only_over) {
    if (is_idle(only_over)) return;
    __shared__ BlockScratch<kPlanBlock> sums;
    BlockTeam<kPlanBlock> block(sums);
    Scratch* scratch = own_part(table).scratch;
    plan_message(block, own_part(table).masks, state->nonfinite, skip_nonfinite, &scratch->plan);
    if (threadIdx.x > 0) return;
    scratch->crc = scratch->sealed_blocks = 0;
    if (part_index(table) == 0) *totals = {};
}

__global__ void __launch_bounds__(kBlock)
    size_kernel(const __grid_constant__ PartTable table, const Selection* only_over) {
    if (is_idle(only_over)) return;
    __shared__ BlockScratch<kBlock> sums;
    __shared__ FindShared find;
    BlockTeam<kBlock> block(sums);
    const PartWork& own = own_part(table);
    const Plan plan = own.scratch->plan;
    for (uint64_t i = blockIdx.x; i < plan.chunks; i += gridDim.x)
        size_chunk(block, own.masks, plan, i, own.records, find);
}

__global__ void __launch_bounds__(kBlock)
    layout_kernel(const __grid_constant__ PartTable table, const EncoderState* state, uint32_t key,
                  const Selection* only_over) {
    if (is_idle(only_over)) return;
    __shared__ BlockScratch<kBlock> sums;
    BlockTeam<kBlock> block(sums);
    const PartWork& own = own_part(table);
    const HeaderWords words{state->used, state->flags, key, static_cast<uint32_t>(state->step)};
    layout_message(block, blockIdx.x, gridDim.x, own.masks, words, &own.scratch->plan, own.records,
                   own.message_words());
}

// One thread.
__global__ void weigh_kernel(const __grid_constant__ PartTable table, Budget budget, const EncoderState* state,
                             Selection* selection) {
    if (table.first == 0) *selection = Selection{};
    for (uint32_t p = 0; p < table.count; ++p) {
        const Plan& plan = table.parts[p].scratch->plan;
        selection->bytes += kHeaderBytes + plan.payload_bytes();
        selection->reached += plan.count;
    }
    const bool is_shakeup = state->flags & kFlagShakeUp;
    selection->is_over = is_over(budget, selection->bytes, selection->reached, is_shakeup);
}

// A thread for each word of the whole.
template <class Residual>
__global__ void __launch_bounds__(kBlock) put_back_kernel(Masks whole, Residual* residual, const EncoderState* state,
                                                          uint64_t* bins, const Selection* selection) {
    if (!selection->is_over) return;
    put_back_word(whole, residual, quantum_of<Residual>(*state), uint64_t{blockIdx.x} * kBlock + threadIdx.x, bins);
}

__global__ void __launch_bounds__(kPlanBlock)
    choose_kernel(uint64_t* bins, uint64_t most_changed, double rounding_point, Selection* selection,
                  EncoderState* state) {
    __shared__ BlockScratch<kPlanBlock> sums;
    if (!selection->is_over) return;
    BlockTeam<kPlanBlock> block(sums);
    choose_lowest(block, bins, most_changed, selection);
    if (threadIdx.x > 0) return;
    state->used = threshold_from(selection->lowest, rounding_point);
    state->held_back = selection->reached - most_changed;
}

// A block for each group of the parts. The counts take the place of those of the elements that reached the threshold.
template <class Residual>
__global__ void __launch_bounds__(kBlock)
    count_ties_kernel(const __grid_constant__ PartTable table, Partition partition, const Residual* residual,
                      const Selection* selection) {
    __shared__ BlockScratch<kBlock> sums;
    const Masks masks = own_part(table).masks;
    if (!selection->is_over || blockIdx.x >= masks.group_total()) return;
    BlockTeam<kBlock> block(sums);
    const uint64_t ties =
        count_ties(block, {partition, part_index(table)}, masks, residual, selection->lowest, blockIdx.x);
    if (threadIdx.x == 0) masks.group_count[blockIdx.x] = static_cast<uint32_t>(ties);
}

// One thread, after a plan of the ties.
__global__ void order_ties_kernel(const __grid_constant__ PartTable table, Selection* selection) {
    if (!selection->is_over) return;
    for (uint32_t p = 0; p < table.count; ++p) {
        Scratch* const scratch = table.parts[p].scratch;
        scratch->ties_before = selection->ties_before;
        selection->ties_before += scratch->plan.count;
    }
}

// A block for each group of the parts.
template <class Residual>
__global__ void __launch_bounds__(kBlock)
    keep_largest_kernel(const __grid_constant__ PartTable table, Partition partition, Residual* residual,
                        const Selection* selection, const EncoderState* state) {
    __shared__ BlockScratch<kBlock> sums;
    __shared__ MaskPair kept[kBlock];
    __shared__ uint32_t counts[kWarps];
    const PartWork& own = own_part(table);
    if (!selection->is_over || blockIdx.x >= own.masks.group_total()) return;
    BlockTeam<kBlock> block(sums);
    keep_largest(block, {partition, part_index(table)}, own.masks, residual, *selection, own.scratch->ties_before,
                 blockIdx.x, quantum_of<Residual>(*state), kept);
    const uint64_t tile = blockIdx.x * kGroupTiles + threadIdx.x / kWarpThreads;
    uint32_t count = 0;
    if (tile < own.masks.tile_count()) {
        WarpTeam warp;
        const MaskPair* words = kept + threadIdx.x / kWarpThreads * kTileWords;
        count = store_words(warp, own.masks, tile, [&](unsigned lane) { return words[lane]; });
    }
    store_group_count(own.masks, blockIdx.x, count, counts);
}

// Undoes pass 1 instead if the update was not finite.
template <class Residual>
__global__ void __launch_bounds__(kBlock, 3)
    write_kernel(const __grid_constant__ PartTable table, Masks whole, Residual* residual, const EncoderState* state) {
    __shared__ BlockScratch<kBlock> sums;
    BlockTeam<kBlock> block(sums);
    const PartWork& own = own_part(table);
    const Plan& plan = own.scratch->plan;
    for (uint64_t i = blockIdx.x; i < plan.chunks; i += gridDim.x)
        write_chunk(block, own.masks, plan, i, own.records, own.message_words());
    if (!plan.restores || part_index(table) > 0) return;
    const Residual quantum = quantum_of<Residual>(*state);
    for (uint64_t tile = uint64_t{blockIdx.x} * kBlock + threadIdx.x; tile < whole.tile_count();
         tile += uint64_t{gridDim.x} * kBlock)
        restore_tile(whole, residual, quantum, tile);
}

template <class Residual>
__global__ void __launch_bounds__(kBlock)
    clip_kernel(Residual* residual, uint64_t numel, double clip_limit, const Scratch* scratch, EncoderState* state) {
    if (!state->clips || scratch->plan.restores) return;
    const auto limit = static_cast<Residual>(clip_limit * static_cast<double>(bfloat16_to_float(state->rounded)));
    for (uint64_t i = uint64_t{blockIdx.x} * kBlock + threadIdx.x; i < numel; i += uint64_t{gridDim.x} * kBlock) {
        const Residual value = residual[i];
        if (!(absolute(value) > limit)) continue;
        const Residual kept = value < 0 ? -limit : limit;
        atomic_add(&state->clipped_now, 1);
        atomicAdd(&state->clipped_sum_now, static_cast<double>(value) - static_cast<double>(kept));
        residual[i] = kept;
    }
}

// Writes dense messages but their checksums, or empty messages if the update was not finite.
template <class Residual>
__global__ void __launch_bounds__(kBlock)
    values_kernel(const __grid_constant__ PartTable table, Partition partition, Residual* residual, DenseType dtype,
                  uint32_t key, const EncoderState* state) {
    const PartWork& own = own_part(table);
    Scratch* scratch = own.scratch;
    const uint64_t numel = own.masks.numel;
    const bool refused = scratch->plan.restores;
    if (!refused)
        for (uint64_t i = uint64_t{blockIdx.x} * kBlock + threadIdx.x; i < numel; i += uint64_t{gridDim.x} * kBlock)
            send_value(residual[element_of_whole({partition, part_index(table)}, i)], dtype, own.message + kHeaderBytes,
                       i);
    if (blockIdx.x > 0 || threadIdx.x > 0) return;
    Header header;
    header.key = key;
    header.step = static_cast<uint32_t>(state->step);
    header.numel = numel;
    if (refused) {
        header.threshold = state->rounded;
        header.exponent = static_cast<uint8_t>(chunk_exponent(0));
    } else {
        header.kind = Kind::kDense;
        header.dtype = dtype;
        header.count = numel;
        header.payload_bytes = numel * bytes_per_value(dtype);
    }
    put_header(own.message, header);
    scratch->plan.count = header.count;
    scratch->plan.stream_bits = header.payload_bytes * 8;
}

// The last block to finish a message writes its checksum and status, that of the last message also the state of the
// next step.
__global__ void __launch_bounds__(kBlock, 4)
    seal_kernel(const __grid_constant__ PartTable table, uint32_t messages, uint64_t numel,
                const __grid_constant__ Policy policy, bool follows, StepTotals* totals, EncoderState* state) {
    __shared__ BlockScratch<kBlock> sums;
    __shared__ CrcWork work;
    __shared__ bool is_last;
    load_crc_work(encode_crc, work);
    BlockTeam<kBlock> block(sums);
    const PartWork& own = own_part(table);
    Scratch* const scratch = own.scratch;
    const uint64_t size = kHeaderBytes + scratch->plan.payload_bytes();
    const ByteSource bytes{own.message, size};
    add_slices(block, blockIdx.x, gridDim.x, work.tables, work.powers, bytes, &scratch->crc);
    if (threadIdx.x == 0) {
        __threadfence();
        is_last = atomicAdd(&scratch->sealed_blocks, 1U) + 1 == gridDim.x;
    }
    __syncthreads();
    if (!is_last || threadIdx.x > 0) return;
    __threadfence();
    const uint32_t crc = finish_crc(work.tables, work.powers, bytes, atomicXor(&scratch->crc, 0U));
    put_field(own.message + kCrcAt, crc);
    const bool refused = scratch->plan.restores;
    *own.status = {0, refused, state->nonfinite.count, state->nonfinite.first};
    atomicAdd(&totals->count, static_cast<unsigned long long>(scratch->plan.count));
    atomicAdd(&totals->message_bytes, static_cast<unsigned long long>(size));
    __threadfence();
    if (atomicAdd(&totals->sealed_messages, 1U) + 1 < messages) return;
    __threadfence();
    if (!refused)
        finish_step(policy, *state, numel, atomicAdd(&totals->count, 0ULL), messages,
                    atomicAdd(&totals->message_bytes, 0ULL), follows);
    clear_step(*state);
}

__global__ void __launch_bounds__(kBlock) publish_kernel(const __grid_constant__ PartTable table) {
    const PartWork& own = own_part(table);
    if (!own.copy) return;
    const auto* message = reinterpret_cast<const uint4*>(own.message);
    auto* copy = reinterpret_cast<uint4*>(own.copy);
    const uint64_t vectors = (kHeaderBytes + own.scratch->plan.payload_bytes() + 15) / 16;
    for (uint64_t i = uint64_t{blockIdx.x} * kBlock + threadIdx.x; i < vectors; i += uint64_t{gridDim.x} * kBlock)
        copy[i] = message[i];
}

// A thread for each sampled group, one every `stride` elements, whose first element is in [begin, end).
template <class Residual>
__global__ void __launch_bounds__(kBlock)
    sample_kernel(const __grid_constant__ ArrayTable updates, const Residual* residual, uint64_t begin, uint64_t end,
                  uint64_t numel, uint64_t stride, uint32_t* bins, Policy policy, EncoderState* state) {
    if (!samples(policy, *state)) return;
    const uint64_t offset = first_sampled(stride, sample_turn(*state));
    const uint64_t before = begin > offset ? (begin - offset + stride - 1) / stride : 0;
    const uint64_t first = offset + (before + uint64_t{blockIdx.x} * kBlock + threadIdx.x) * stride;
    if (first >= end) return;
    sample_group(residual, updates, first, numel, levels_of<Residual>(state->used, policy.rounding_point), bins,
                 &state->sample);
}

// A block for each quantile.
__global__ void __launch_bounds__(kBlock) quantile_kernel(uint32_t* bins, Policy policy, EncoderState* state) {
    __shared__ BlockScratch<kBlock> sums;
    if (state->sample.elements == 0) return;  // not sampled, so that the bins are empty
    BlockTeam<kBlock> block(sums);
    const double want = policy.density * static_cast<double>(state->sample.elements);
    double* const quantile = &state->sample.quantile[blockIdx.x];
    double* const floor = blockIdx.x == 0 ? &state->sample.floor : nullptr;
    find_quantile(block, bins + blockIdx.x * kBins, want, quantile, floor);
    __syncthreads();
    if (threadIdx.x > 0) return;
    *quantile /= policy.rounding_point;
    if (floor) *floor /= policy.rounding_point;
}

__global__ void begin_kernel(EncoderState* state, uint16_t threshold, uint32_t step) {
    state->used = state->rounded = threshold;
    state->threshold = static_cast<double>(bfloat16_to_float(threshold));
    state->step = step;
    state->flags = 0;
    state->nonfinite = {0, UINT64_MAX};
}

// One thread: the sample decides the threshold of the very first step.
__global__ void learn_kernel(Policy policy, EncoderState* state) { learn_threshold(policy, *state); }

__global__ void clear_sample_kernel(EncoderState* state) { state->sample = SampleTotals{}; }

template <class Residual>
constexpr auto extract_float64() {
    if constexpr (sizeof(Residual) == 8)
        return extract_kernel<Residual, double>;
    else
        return nullptr;
}

template <class Residual>
const EncodeKernels<Residual>& encode_kernels() {
    static const EncodeKernels<Residual> kernels{
        {extract_kernel<Residual, Accumulated>, extract_kernel<Residual, float>, extract_float64<Residual>(),
         extract_kernel<Residual, Half>, extract_kernel<Residual, Bfloat16>},
        deal_kernel,
        plan_kernel,
        size_kernel,
        layout_kernel,
        weigh_kernel,
        put_back_kernel<Residual>,
        choose_kernel,
        count_ties_kernel<Residual>,
        order_ties_kernel,
        keep_largest_kernel<Residual>,
        write_kernel<Residual>,
        clip_kernel<Residual>,
        values_kernel<Residual>,
        seal_kernel,
        publish_kernel,
        sample_kernel<Residual>,
        quantile_kernel,
        begin_kernel,
        learn_kernel,
        clear_sample_kernel};
    return kernels;
}
template const EncodeKernels<float>& encode_kernels();
template const EncodeKernels<double>& encode_kernels();

}  // namespace gradwire::cuda
