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
// messages fit.
//
// From deal on, blockIdx.y is the part.
#include <algorithm>

#include "budget.h"
#include "crc_tables.cuh"
#include "dense.h"
#include "device_team.cuh"
#include "encoder.h"
#include "extract_tile.h"
#include "launch.cuh"
#include "layout.h"
#include "quantile_sample.h"
#include "ranges.h"

namespace gradwire::cuda {

// Values of one message that only kernels use.
struct Scratch {
    Plan plan;
    uint64_t ties_before;  // with a budget: elements in the lowest bin in the parts before
    uint32_t crc;
    uint32_t sealed_blocks;
};

// Totals of the messages of one step.
struct StepTotals {
    unsigned long long count;
    unsigned long long message_bytes;
    uint32_t sealed_messages;
};

// The message of one part, and the memory of its pass 2.
struct PartWork {
    Masks masks;
    Scratch* scratch;
    ChunkRecord* records;
    uint8_t* message;
    uint8_t* copy;  // pinned; may be null
    MessageStatus* status;

    GRADWIRE_HD uint32_t* message_words() const { return reinterpret_cast<uint32_t*>(message); }
};

constexpr unsigned kMostParts = 32;  // of one launch

// The parts first, first + 1, ... as the argument of a kernel.
struct PartTable {
    uint32_t first = 0;
    uint32_t count = 0;
    PartWork parts[kMostParts];

    __device__ const PartWork& own() const { return parts[blockIdx.y]; }
    __device__ uint64_t index() const { return first + blockIdx.y; }
};
static_assert(sizeof(PartTable) <= 3800, "fits beside a kernel's other arguments");

namespace {

constexpr unsigned kBlock = 256;
constexpr unsigned kPlanBlock = 1024;
constexpr unsigned kWarps = kBlock / kWarpThreads;
static_assert(kWarps == kGroupTiles, "a block of warps for each group of tiles");

template <class Residual>
__device__ Residual threshold_of(const EncoderState& state) {
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

// A warp for each tile. No finite value passes the infinite threshold of `dense`, which therefore only accumulates.
template <class Residual, class Update>
__global__ void __launch_bounds__(kBlock)
    extract_kernel(const __grid_constant__ ArrayTable updates, ExtractTarget<Residual> to, const EncoderState* state,
                   uint64_t first_group, bool dense) {
    __shared__ TileShared tiles[kWarps];
    __shared__ uint32_t counts[kWarps];
    const unsigned warp_index = threadIdx.x / kWarpThreads;
    const uint64_t group = first_group + blockIdx.x;
    const uint64_t tile = group * kGroupTiles + warp_index;
    const Residual threshold = dense ? endless<Residual>() : threshold_of<Residual>(*state);
    uint32_t count = 0;
    if (tile < to.masks.tile_count()) {
        WarpTeam warp;
        count = extract_tile<WarpTeam, Residual, Update>(warp, to, updates, threshold, tile, tiles[warp_index]);
    }
    store_group_count(to.masks, group, count, counts);
}

// A warp for each tile of the parts.
__global__ void __launch_bounds__(kBlock)
    deal_kernel(Masks whole, Partition partition, const __grid_constant__ PartTable table) {
    __shared__ uint32_t counts[kWarps];
    const Masks masks = table.own().masks;
    const uint64_t group = blockIdx.x;
    if (group >= masks.group_total()) return;
    const uint64_t tile = group * kGroupTiles + threadIdx.x / kWarpThreads;
    uint32_t count = 0;
    if (tile < masks.tile_count()) {
        WarpTeam warp;
        count = deal_tile(warp, whole, {partition, table.index()}, masks, tile);
    }
    store_group_count(masks, group, count, counts);
}

// Whether a kernel has nothing to do: launched for steps over their budget, in a step that is not.
__device__ bool is_idle(const Selection* only_over) { return only_over && !only_over->is_over; }

__global__ void __launch_bounds__(kPlanBlock)
    plan_kernel(const __grid_constant__ PartTable table, const EncoderState* state, bool skip_nonfinite,
                StepTotals* totals, const Selection* only_over) {
    if (is_idle(only_over)) return;
    __shared__ BlockScratch<kPlanBlock> sums;
    BlockTeam<kPlanBlock> block(sums);
    Scratch* scratch = table.own().scratch;
    plan_message(block, table.own().masks, state->nonfinite, skip_nonfinite, &scratch->plan);
    if (threadIdx.x > 0) return;
    scratch->crc = scratch->sealed_blocks = 0;
    if (table.index() == 0) *totals = {};
}

__global__ void __launch_bounds__(kBlock)
    size_kernel(const __grid_constant__ PartTable table, const Selection* only_over) {
    if (is_idle(only_over)) return;
    __shared__ BlockScratch<kBlock> sums;
    __shared__ FindShared find;
    BlockTeam<kBlock> block(sums);
    const PartWork& own = table.own();
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
    const PartWork& own = table.own();
    const HeaderWords words{state->used, state->flags, key, static_cast<uint32_t>(state->step)};
    layout_message(block, blockIdx.x, gridDim.x, own.masks, words, &own.scratch->plan, own.records,
                   own.message_words());
}

// One thread.
__global__ void weigh_kernel(const __grid_constant__ PartTable table, Budget budget, Selection* selection) {
    if (table.first == 0) *selection = Selection{};
    for (uint32_t p = 0; p < table.count; ++p) {
        const Plan& plan = table.parts[p].scratch->plan;
        selection->bytes += kHeaderBytes + plan.payload_bytes();
        selection->reached += plan.count;
    }
    selection->is_over = selection->bytes > budget.max_bytes && selection->reached > budget.most_changed;
}

// A thread for each word of the whole.
template <class Residual>
__global__ void __launch_bounds__(kBlock) put_back_kernel(Masks whole, Residual* residual, const EncoderState* state,
                                                          uint64_t* bins, const Selection* selection) {
    if (!selection->is_over) return;
    put_back_word(whole, residual, threshold_of<Residual>(*state), uint64_t{blockIdx.x} * kBlock + threadIdx.x, bins);
}

__global__ void __launch_bounds__(kPlanBlock)
    choose_kernel(uint64_t* bins, uint64_t most_changed, Selection* selection, EncoderState* state) {
    __shared__ BlockScratch<kPlanBlock> sums;
    if (!selection->is_over) return;
    BlockTeam<kPlanBlock> block(sums);
    choose_lowest(block, bins, most_changed, selection);
    if (threadIdx.x > 0) return;
    state->used = static_cast<uint16_t>(selection->lowest);
    state->held_back = selection->reached - most_changed;
}

// A block for each group of the parts. The counts take the place of those of the elements that reached the threshold.
template <class Residual>
__global__ void __launch_bounds__(kBlock)
    count_ties_kernel(const __grid_constant__ PartTable table, Partition partition, const Residual* residual,
                      const Selection* selection) {
    __shared__ BlockScratch<kBlock> sums;
    const Masks masks = table.own().masks;
    if (!selection->is_over || blockIdx.x >= masks.group_total()) return;
    BlockTeam<kBlock> block(sums);
    const uint64_t ties = count_ties(block, {partition, table.index()}, masks, residual, selection->lowest, blockIdx.x);
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
                        const Selection* selection) {
    __shared__ BlockScratch<kBlock> sums;
    __shared__ MaskPair kept[kBlock];
    __shared__ uint32_t counts[kWarps];
    const PartWork& own = table.own();
    if (!selection->is_over || blockIdx.x >= own.masks.group_total()) return;
    BlockTeam<kBlock> block(sums);
    keep_largest(block, {partition, table.index()}, own.masks, residual, *selection, own.scratch->ties_before,
                 blockIdx.x, kept);
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
    const PartWork& own = table.own();
    const Plan& plan = own.scratch->plan;
    for (uint64_t i = blockIdx.x; i < plan.chunks; i += gridDim.x)
        write_chunk(block, own.masks, plan, i, own.records, own.message_words());
    if (!plan.restores || table.index() > 0) return;
    const Residual threshold = threshold_of<Residual>(*state);
    for (uint64_t tile = uint64_t{blockIdx.x} * kBlock + threadIdx.x; tile < whole.tile_count();
         tile += uint64_t{gridDim.x} * kBlock)
        restore_tile(whole, residual, threshold, tile);
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
    const PartWork& own = table.own();
    Scratch* scratch = own.scratch;
    const uint64_t numel = own.masks.numel;
    const bool refused = scratch->plan.restores;
    if (!refused)
        for (uint64_t i = uint64_t{blockIdx.x} * kBlock + threadIdx.x; i < numel; i += uint64_t{gridDim.x} * kBlock)
            send_value(residual[element_of_whole({partition, table.index()}, i)], dtype, own.message + kHeaderBytes, i);
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
    load_crc_work(work);
    BlockTeam<kBlock> block(sums);
    const PartWork& own = table.own();
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
    const PartWork& own = table.own();
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
    const uint64_t first = ((begin + stride - 1) / stride + uint64_t{blockIdx.x} * kBlock + threadIdx.x) * stride;
    if (first >= end) return;
    sample_group(residual, updates, first, numel, threshold_of<Residual>(*state), bins, &state->sample);
}

// A block for each quantile.
__global__ void __launch_bounds__(kBlock) quantile_kernel(uint32_t* bins, double density, EncoderState* state) {
    __shared__ BlockScratch<kBlock> sums;
    BlockTeam<kBlock> block(sums);
    const double want = density * static_cast<double>(state->sample.elements);
    find_quantile(block, bins + blockIdx.x * kBins, want, &state->sample.quantile[blockIdx.x]);
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

}  // namespace

// The memory of an encoder: one allocation, and one for parts.
struct Workspace {
    DeviceMemory<uint8_t> memory;
    uint8_t* residual;
    EncoderState* state;
    StepTotals* totals;
    uint32_t* bins;
    uint64_t* magnitudes;  // bins of a step over its budget
    Selection* selection;
    PartWork whole;  // the output of pass 1, and the work of an encode without parts

    std::vector<DeviceMemory<uint8_t>> parts_memory;  // the last is in use; graphs may use the others
    uint64_t parts_bytes = 0;
};

namespace {

// Deals out the pieces of an allocation. With a null pointer the pieces are only counted.
class Pieces {
  public:
    explicit Pieces(uint8_t* base) : base_(reinterpret_cast<uintptr_t>(base)) {}
    template <class T>
    T* take(uint64_t count) {
        const uint64_t at = used_;
        used_ += (count * sizeof(T) + 255) / 256 * 256;
        return reinterpret_cast<T*>(base_ + at);
    }
    PartWork take_part(uint64_t numel) {
        PartWork work{};
        Masks& masks = work.masks;
        masks.numel = numel;
        masks.tiles = take<TileRecord>(masks.tile_count());
        masks.pairs = take<MaskPair>(masks.tile_count() * kTileWords);
        masks.group_count = take<uint32_t>(masks.group_total());
        masks.group_first = take<uint64_t>(masks.group_total() + 1);
        work.scratch = take<Scratch>(1);
        work.records = take<ChunkRecord>(most_chunks(numel));
        return work;
    }
    uint64_t used() const { return used_; }

  private:
    uintptr_t base_;
    uint64_t used_ = 0;
};

uint64_t place(Workspace& work, uint64_t numel, uint64_t residual_bytes) {
    Pieces pieces(work.memory.get());
    work.residual = pieces.take<uint8_t>(residual_bytes);
    work.state = pieces.take<EncoderState>(1);
    work.totals = pieces.take<StepTotals>(1);
    work.bins = pieces.take<uint32_t>(kSampleQuantiles * kBins);
    work.magnitudes = pieces.take<uint64_t>(kMagnitudeBins);
    work.selection = pieces.take<Selection>(1);
    work.whole = pieces.take_part(numel);
    return pieces.used();
}

std::unique_ptr<Workspace> allocate_workspace(uint64_t numel, uint64_t residual_bytes) {
    auto work = std::make_unique<Workspace>();
    work->memory = allocate_device(place(*work, numel, residual_bytes));
    place(*work, numel, residual_bytes);
    CUDA_TRY(cudaMemset(work->residual, 0, residual_bytes));
    CUDA_TRY(cudaMemset(work->state, 0, sizeof(EncoderState)));
    CUDA_TRY(cudaMemset(work->whole.scratch, 0, sizeof(Scratch)));
    CUDA_TRY(cudaMemset(work->bins, 0, kSampleQuantiles * kBins * sizeof(uint32_t)));
    CUDA_TRY(cudaMemset(work->magnitudes, 0, kMagnitudeBins * sizeof(uint64_t)));
    return work;
}

std::vector<PartWork> place_parts(uint8_t* memory, const Partition& partition, uint64_t* bytes) {
    Pieces pieces(memory);
    std::vector<PartWork> parts;
    for (uint64_t p = 0; p < partition.parts; ++p) parts.push_back(pieces.take_part(numel_of({partition, p})));
    *bytes = pieces.used();
    return parts;
}

// Return the parts in as many tables as they need.
std::vector<PartTable> part_tables(Workspace& work, const Partition& partition, const std::vector<MessageBuffer*>& to) {
    std::vector<PartWork> parts{work.whole};
    if (partition.parts > 1) {
        uint64_t bytes = 0;
        place_parts(nullptr, partition, &bytes);
        if (bytes > work.parts_bytes) {
            bytes += bytes / 8;  // so that a few more parts need no other allocation
            work.parts_memory.push_back(allocate_device(bytes));
            work.parts_bytes = bytes;
        }
        parts = place_parts(work.parts_memory.back().get(), partition, &bytes);
    }
    std::vector<PartTable> tables((parts.size() + kMostParts - 1) / kMostParts);
    for (uint32_t p = 0; p < parts.size(); ++p) {
        PartTable& table = tables[p / kMostParts];
        if (table.count == 0) table.first = p;
        PartWork& own = table.parts[table.count++];
        own = parts[p];
        own.message = to[p]->on_device;
        own.copy = to[p]->on_host;
        own.status = to[p]->status;
    }
    return tables;
}

}  // namespace

DeviceEncoder::DeviceEncoder(int device, uint64_t numel, Dtype dtype, const Policy& policy, const Course& course)
    : device_(device), numel_(numel), dtype_(dtype), policy_(policy) {
    allocate(numel * bytes_per_element(dtype));
    set_state(course, 0, 0);
}

DeviceEncoder::DeviceEncoder(int device, uint64_t numel, Dtype dtype) : device_(device), numel_(numel), dtype_(dtype) {
    allocate(0);
    CUDA_TRY(cudaDeviceSynchronize());
}

DeviceEncoder::~DeviceEncoder() = default;

void DeviceEncoder::allocate(uint64_t residual_bytes) {
    const DeviceScope scope(device_);
    int processors = 0;
    CUDA_TRY(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device_));
    processors_ = static_cast<unsigned>(processors);
    work_ = allocate_workspace(numel_, residual_bytes);
}

void* DeviceEncoder::residual() const { return work_->residual; }

EncoderState DeviceEncoder::state() {
    const DeviceScope scope(device_);
    EncoderState state;
    CUDA_TRY(cudaDeviceSynchronize());  // a copy does not wait for non-blocking streams
    CUDA_TRY(cudaMemcpy(&state, work_->state, sizeof state, cudaMemcpyDeviceToHost));
    return state;
}

void DeviceEncoder::set_state(const Course& course, uint64_t step, uint64_t changed_at) {
    EncoderState state = this->state();
    state.threshold = course.threshold;
    state.trend = course.trend;
    state.deviation = course.deviation;
    state.step = step;
    state.changed_at = changed_at;
    clear_step(state);
    prepare_step(policy_, state);
    const DeviceScope scope(device_);
    CUDA_TRY(cudaMemcpy(work_->state, &state, sizeof state, cudaMemcpyHostToDevice));
    CUDA_TRY(cudaDeviceSynchronize());
}

unsigned DeviceEncoder::blocks_for(uint64_t work, unsigned per_processor) const {
    return static_cast<unsigned>(std::clamp<uint64_t>(work, 1, uint64_t{processors_} * per_processor));
}

template <class Residual>
void DeviceEncoder::extract(const std::vector<ConstArray>* update, bool dense, cudaStream_t stream) {
    const ExtractTarget<Residual> to{reinterpret_cast<Residual*>(work_->residual), work_->whole.masks,
                                     &work_->state->nonfinite};
    const auto launch = [&](auto kernel, const ArrayTable& updates, uint64_t begin, uint64_t end) {
        const uint64_t blocks = (end - begin + kGroupElements - 1) / kGroupElements;
        CUDA_LAUNCH("extract", kernel, static_cast<unsigned>(blocks), kBlock, stream, updates, to, work_->state,
                    begin / kGroupElements, dense);
    };
    if (numel_ == 0) return;
    if (!update) return launch(extract_kernel<Residual, Accumulated>, ArrayTable{}, 0, numel_);
    for (const ArrayRange& range : cut_ranges(*update, numel_, kGroupElements)) {
        // Tiles of other types are read element by element, which is slower.
        switch (static_cast<Dtype>(range.arrays.dtypes[0])) {
            case Dtype::kFloat32: launch(extract_kernel<Residual, float>, range.arrays, range.begin, range.end); break;
            case Dtype::kFloat64:
                if constexpr (sizeof(Residual) == 8)
                    launch(extract_kernel<Residual, double>, range.arrays, range.begin, range.end);
                break;
            case Dtype::kFloat16: launch(extract_kernel<Residual, Half>, range.arrays, range.begin, range.end); break;
            case Dtype::kBfloat16:
                launch(extract_kernel<Residual, Bfloat16>, range.arrays, range.begin, range.end);
                break;
            case Dtype::kNone: break;
        }
    }
}

template <class Residual>
void DeviceEncoder::sample(const std::vector<ConstArray>* update, cudaStream_t stream) {
    CUDA_LAUNCH("clear_sample", clear_sample_kernel, 1, 1, stream, work_->state);
    const auto* residual = reinterpret_cast<const Residual*>(work_->residual);
    const uint64_t stride = sample_stride(numel_, policy_.density);
    const auto launch = [&](const ArrayTable& updates, uint64_t begin, uint64_t end) {
        const uint64_t groups = (end - begin) / stride + 1;
        CUDA_LAUNCH("sample", sample_kernel<Residual>, static_cast<unsigned>((groups + kBlock - 1) / kBlock), kBlock,
                    stream, updates, residual, begin, end, numel_, stride, work_->bins, policy_, work_->state);
    };
    if (update)
        for (const ArrayRange& range : cut_ranges(*update, numel_, kGroupElements))
            launch(range.arrays, range.begin, range.end);
    else
        launch(ArrayTable{}, 0, numel_);
    CUDA_LAUNCH("quantile", quantile_kernel, kSampleQuantiles, kBlock, stream, work_->bins, policy_.density,
                work_->state);
    CUDA_LAUNCH("learn", learn_kernel, 1, 1, stream, policy_, work_->state);
}

// Extract fewer elements where the messages that are laid out are too large.
template <class Residual>
void DeviceEncoder::keep_to_budget(const std::vector<PartTable>& tables, const Partition& partition,
                                   const Budget& budget, cudaStream_t stream) {
    auto* residual = reinterpret_cast<Residual*>(work_->residual);
    Selection* selection = work_->selection;
    const Masks& whole = work_->whole.masks;
    const auto words = static_cast<unsigned>((whole.tile_count() * kTileWords + kBlock - 1) / kBlock);
    const auto groups = static_cast<unsigned>(tables[0].parts[0].masks.group_total());
    for (const PartTable& table : tables) CUDA_LAUNCH("weigh", weigh_kernel, 1, 1, stream, table, budget, selection);
    CUDA_LAUNCH("put_back", put_back_kernel<Residual>, words, kBlock, stream, whole, residual, work_->state,
                work_->magnitudes, selection);
    CUDA_LAUNCH("choose", choose_kernel, 1, kPlanBlock, stream, work_->magnitudes, budget.most_changed, selection,
                work_->state);
    for (const PartTable& table : tables) {
        CUDA_LAUNCH("count_ties", count_ties_kernel<Residual>, dim3(groups, table.count), kBlock, stream, table,
                    partition, residual, selection);
        CUDA_LAUNCH("plan", plan_kernel, dim3(1, table.count), kPlanBlock, stream, table, work_->state, true,
                    work_->totals, selection);
        CUDA_LAUNCH("order_ties", order_ties_kernel, 1, 1, stream, table, selection);
    }
    for (const PartTable& table : tables) {
        CUDA_LAUNCH("keep_largest", keep_largest_kernel<Residual>, dim3(groups, table.count), kBlock, stream, table,
                    partition, residual, selection);
        CUDA_LAUNCH("plan", plan_kernel, dim3(1, table.count), kPlanBlock, stream, table, work_->state, true,
                    work_->totals, selection);
    }
}

// All parts have messages of at most the size of part 0.
template <class Residual>
void DeviceEncoder::encode_ternary(const std::vector<PartTable>& tables, const Partition& partition,
                                   const Budget& budget, uint32_t key, cudaStream_t stream) {
    auto* residual = reinterpret_cast<Residual*>(work_->residual);
    const uint64_t largest = tables[0].parts[0].masks.numel;
    const unsigned chunk_blocks = blocks_for(most_chunks(largest), 6);
    const unsigned layout_blocks = blocks_for(max_ternary_bytes(largest) / 16384, 1);
    const auto lay_out = [&](const Selection* only_over) {
        for (const PartTable& table : tables) {
            CUDA_LAUNCH("size", size_kernel, dim3(chunk_blocks, table.count), kBlock, stream, table, only_over);
            CUDA_LAUNCH("layout", layout_kernel, dim3(layout_blocks, table.count), kBlock, stream, table, work_->state,
                        key, only_over);
        }
    };
    lay_out(nullptr);
    if (budget.max_bytes != UINT64_MAX && numel_ > 0) {
        keep_to_budget<Residual>(tables, partition, budget, stream);
        lay_out(work_->selection);
    }
    for (const PartTable& table : tables)
        CUDA_LAUNCH("write", write_kernel<Residual>, dim3(chunk_blocks, table.count), kBlock, stream, table,
                    work_->whole.masks, residual, work_->state);
    if (policy_.clip_every == 0) return;
    CUDA_LAUNCH("clip", clip_kernel<Residual>, blocks_for(numel_ / kBlock, 8), kBlock, stream, residual, numel_,
                policy_.clip_limit, tables[0].parts[0].scratch, work_->state);
}

template <class Residual>
void DeviceEncoder::encode_as(const std::vector<ConstArray>* update, uint32_t key, bool skip_nonfinite, DenseType dense,
                              const Partition& partition, const Budget& budget, const std::vector<MessageBuffer*>& to,
                              cudaStream_t stream) {
    const std::vector<PartTable> tables = part_tables(*work_, partition, to);
    const PartWork& largest = tables[0].parts[0];
    const uint64_t capacity = to[0]->capacity;
    const bool is_dense = dense != DenseType::kNone;
    if (!is_dense && policy_.rule == Rule::kTargetDensity && numel_ > 0) sample<Residual>(update, stream);
    extract<Residual>(update, is_dense, stream);
    for (const PartTable& table : tables) {
        if (partition.parts > 1 && numel_ > 0)
            CUDA_LAUNCH("deal", deal_kernel, dim3(static_cast<unsigned>(largest.masks.group_total()), table.count),
                        kBlock, stream, work_->whole.masks, partition, table);
        CUDA_LAUNCH("plan", plan_kernel, dim3(1, table.count), kPlanBlock, stream, table, work_->state, skip_nonfinite,
                    work_->totals, nullptr);
        if (is_dense)
            CUDA_LAUNCH("values", values_kernel<Residual>,
                        dim3(blocks_for(largest.masks.numel / kBlock, 8), table.count), kBlock, stream, table,
                        partition, reinterpret_cast<Residual*>(work_->residual), dense, key, work_->state);
    }
    if (!is_dense) encode_ternary<Residual>(tables, partition, budget, key, stream);
    for (const PartTable& table : tables)
        CUDA_LAUNCH("seal", seal_kernel, dim3(blocks_for(capacity / (kBlock * kCrcSlice), 2), table.count), kBlock,
                    stream, table, static_cast<uint32_t>(partition.parts), numel_, policy_, !is_dense, work_->totals,
                    work_->state);
    for (const PartTable& table : tables)
        if (table.parts[0].copy)
            CUDA_LAUNCH("publish", publish_kernel, dim3(blocks_for(capacity / (kBlock * 16), 1), table.count), kBlock,
                        stream, table);
}

void DeviceEncoder::encode(const std::vector<ConstArray>* update, uint32_t key, bool skip_nonfinite, DenseType dense,
                           const Partition& partition, const Budget& budget, const std::vector<MessageBuffer*>& to,
                           cudaStream_t stream) {
    const DeviceScope scope(device_);
    for (MessageBuffer* buffer : to) buffer->begin_use(stream);
    if (dtype_ == Dtype::kFloat64)
        encode_as<double>(update, key, skip_nonfinite, dense, partition, budget, to, stream);
    else
        encode_as<float>(update, key, skip_nonfinite, dense, partition, budget, to, stream);
    for (MessageBuffer* buffer : to) buffer->end_use(stream);
}

void DeviceEncoder::encode_into(void* residual, const std::vector<ConstArray>& update, uint16_t threshold, uint32_t key,
                                uint32_t step, MessageBuffer& to, cudaStream_t stream) {
    const DeviceScope scope(device_);
    CUDA_LAUNCH("begin", begin_kernel, 1, 1, stream, work_->state, threshold, step);
    work_->residual = static_cast<uint8_t*>(residual);
    encode(&update, key, true, DenseType::kNone, undivided(numel_), Budget{}, {&to}, stream);
}

}  // namespace gradwire::cuda
