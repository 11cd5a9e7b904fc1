// The kernels of the encoder and their order. Each kernel is a few lines around an algorithm of the headers.
//
//   kernel     work                                                  memory traffic
//   extract    pass 1 over the data: residual, masks                 12 bytes an element (float32)
//   plan       one block: a scan of the groups' counts               4 bytes for 16,384 elements
//   size       a block for each chunk: its borders and quotients     the listed words
//   layout     zeros, directory, header                              the message
//   write      a block for each chunk: its bits                      the listed words, the message
//   clip       only in a step that clips                             the data
//   seal       checksum, totals, threshold of the next step          the message
//   publish    only with a pinned copy                               the message, over the bus
#include <algorithm>

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
namespace {

constexpr unsigned kBlock = 256;
constexpr unsigned kPlanBlock = 1024;
constexpr unsigned kWarps = kBlock / kWarpThreads;
static_assert(kWarps == kGroupTiles, "a block of warps for each group of tiles");

// Values of one encoder that only kernels use.
struct Scratch {
    Plan plan;
    uint32_t crc;
    uint32_t sealed_blocks;
};

template <class Residual>
__device__ Residual threshold_of(const EncoderState& state) {
    return static_cast<Residual>(bfloat16_to_float(state.used));
}

template <class Residual>
__device__ Residual endless() {
    return static_cast<Residual>(__int_as_float(0x7f800000));
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
    if (threadIdx.x % kWarpThreads == 0) counts[warp_index] = count;
    __syncthreads();
    if (threadIdx.x > 0) return;
    uint32_t sum = 0;
    for (const uint32_t one : counts) sum += one;
    to.masks.group_count[group] = sum;
}

__global__ void __launch_bounds__(kPlanBlock)
    plan_kernel(Masks masks, const EncoderState* state, bool skip_nonfinite, Scratch* scratch) {
    __shared__ BlockScratch<kPlanBlock> sums;
    BlockTeam<kPlanBlock> block(sums);
    plan_message(block, masks, state->nonfinite, skip_nonfinite, &scratch->plan);
    if (threadIdx.x == 0) scratch->crc = scratch->sealed_blocks = 0;
}

__global__ void __launch_bounds__(kBlock) size_kernel(Masks masks, const Scratch* scratch, ChunkRecord* records) {
    __shared__ BlockScratch<kBlock> sums;
    __shared__ FindShared find;
    BlockTeam<kBlock> block(sums);
    const Plan plan = scratch->plan;
    for (uint64_t i = blockIdx.x; i < plan.chunks; i += gridDim.x) size_chunk(block, masks, plan, i, records, find);
}

__global__ void __launch_bounds__(kBlock) layout_kernel(Masks masks, const EncoderState* state, uint32_t key,
                                                        Scratch* scratch, ChunkRecord* records, uint32_t* message) {
    __shared__ BlockScratch<kBlock> sums;
    BlockTeam<kBlock> block(sums);
    const HeaderWords words{state->used, state->flags, key, static_cast<uint32_t>(state->step)};
    layout_message(block, blockIdx.x, gridDim.x, masks, words, &scratch->plan, records, message);
}

// Undoes pass 1 instead if the update was not finite.
template <class Residual>
__global__ void __launch_bounds__(kBlock, 3)
    write_kernel(Masks masks, Residual* residual, const EncoderState* state, const Scratch* scratch,
                 const ChunkRecord* records, uint32_t* message) {
    __shared__ BlockScratch<kBlock> sums;
    BlockTeam<kBlock> block(sums);
    const Plan plan = scratch->plan;
    for (uint64_t i = blockIdx.x; i < plan.chunks; i += gridDim.x) write_chunk(block, masks, plan, i, records, message);
    if (!plan.restores) return;
    const Residual threshold = threshold_of<Residual>(*state);
    for (uint64_t tile = uint64_t{blockIdx.x} * kBlock + threadIdx.x; tile < masks.tile_count();
         tile += uint64_t{gridDim.x} * kBlock)
        restore_tile(masks, residual, threshold, tile);
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

// Writes a dense message but its checksum, or an empty message if the update was not finite.
template <class Residual>
__global__ void __launch_bounds__(kBlock)
    values_kernel(Residual* residual, uint64_t numel, DenseType dtype, uint32_t key, const EncoderState* state,
                  Scratch* scratch, uint8_t* message) {
    const bool refused = scratch->plan.restores;
    if (!refused)
        for (uint64_t i = uint64_t{blockIdx.x} * kBlock + threadIdx.x; i < numel; i += uint64_t{gridDim.x} * kBlock)
            send_value(residual, i, dtype, message + kHeaderBytes);
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
    put_header(message, header);
    scratch->plan.count = header.count;
    scratch->plan.stream_bits = header.payload_bytes * 8;
}

// The last block to finish writes the checksum, the status and the state of the next step.
__global__ void __launch_bounds__(kBlock) seal_kernel(uint8_t* message, uint64_t numel, Policy policy, bool follows,
                                                      Scratch* scratch, EncoderState* state, MessageStatus* status) {
    __shared__ BlockScratch<kBlock> sums;
    __shared__ CrcWork work;
    __shared__ bool is_last;
    load_crc_work(work);
    BlockTeam<kBlock> block(sums);
    const uint64_t size = kHeaderBytes + scratch->plan.payload_bytes();
    const ByteSource bytes{message, size};
    add_slices(block, blockIdx.x, gridDim.x, work.tables, work.powers, bytes, &scratch->crc);
    if (threadIdx.x == 0) {
        __threadfence();
        is_last = atomicAdd(&scratch->sealed_blocks, 1U) + 1 == gridDim.x;
    }
    __syncthreads();
    if (!is_last || threadIdx.x > 0) return;
    __threadfence();
    const uint32_t crc = finish_crc(work.tables, work.powers, bytes, atomicXor(&scratch->crc, 0U));
    put_field(message + kCrcAt, crc);
    const bool refused = scratch->plan.restores;
    *status = {0, refused, state->nonfinite.count, state->nonfinite.first};
    if (!refused) finish_step(policy, *state, numel, scratch->plan.count, size, follows);
    clear_step(*state);
}

__global__ void __launch_bounds__(kBlock) publish_kernel(const uint4* message, const Scratch* scratch, uint4* copy) {
    const uint64_t vectors = (kHeaderBytes + scratch->plan.payload_bytes() + 15) / 16;
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

// The memory of an encoder: one allocation.
struct Workspace {
    DeviceMemory<uint8_t> memory;
    uint8_t* residual;
    EncoderState* state;
    Scratch* scratch;
    Masks masks;
    ChunkRecord* records;
    uint32_t* bins;
};

namespace {

std::unique_ptr<Workspace> allocate_workspace(uint64_t numel, uint64_t residual_bytes) {
    auto work = std::make_unique<Workspace>();
    work->masks.numel = numel;
    uint64_t used = 0;
    const auto reserve = [&](uint64_t bytes) {
        const uint64_t at = used;
        used += (bytes + 255) / 256 * 256;
        return at;
    };
    const uint64_t tiles = work->masks.tile_count(), groups = work->masks.group_total();
    const uint64_t residual = reserve(residual_bytes);
    const uint64_t state = reserve(sizeof(EncoderState));
    const uint64_t scratch = reserve(sizeof(Scratch));
    const uint64_t tile_records = reserve(tiles * sizeof(TileRecord));
    const uint64_t pairs = reserve(tiles * kTileWords * sizeof(MaskPair));
    const uint64_t counts = reserve(groups * sizeof(uint32_t));
    const uint64_t firsts = reserve((groups + 1) * sizeof(uint64_t));
    const uint64_t records = reserve(most_chunks(numel) * sizeof(ChunkRecord));
    const uint64_t bins = reserve(kSampleQuantiles * kBins * sizeof(uint32_t));
    work->memory = allocate_device(used);
    uint8_t* base = work->memory.get();
    work->residual = base + residual;
    work->state = reinterpret_cast<EncoderState*>(base + state);
    work->scratch = reinterpret_cast<Scratch*>(base + scratch);
    work->masks.tiles = reinterpret_cast<TileRecord*>(base + tile_records);
    work->masks.pairs = reinterpret_cast<MaskPair*>(base + pairs);
    work->masks.group_count = reinterpret_cast<uint32_t*>(base + counts);
    work->masks.group_first = reinterpret_cast<uint64_t*>(base + firsts);
    work->records = reinterpret_cast<ChunkRecord*>(base + records);
    work->bins = reinterpret_cast<uint32_t*>(base + bins);
    CUDA_TRY(cudaMemset(work->residual, 0, residual_bytes));
    CUDA_TRY(cudaMemset(work->state, 0, sizeof(EncoderState)));
    CUDA_TRY(cudaMemset(work->scratch, 0, sizeof(Scratch)));
    CUDA_TRY(cudaMemset(work->bins, 0, kSampleQuantiles * kBins * sizeof(uint32_t)));
    return work;
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
    const ExtractTarget<Residual> to{reinterpret_cast<Residual*>(work_->residual), work_->masks,
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

template <class Residual>
void DeviceEncoder::encode_ternary(uint32_t key, bool skip_nonfinite, MessageBuffer& to, cudaStream_t stream) {
    auto* residual = reinterpret_cast<Residual*>(work_->residual);
    auto* message = reinterpret_cast<uint32_t*>(to.on_device);
    const unsigned chunk_blocks = blocks_for(most_chunks(numel_), 6);
    CUDA_LAUNCH("plan", plan_kernel, 1, kPlanBlock, stream, work_->masks, work_->state, skip_nonfinite, work_->scratch);
    CUDA_LAUNCH("size", size_kernel, chunk_blocks, kBlock, stream, work_->masks, work_->scratch, work_->records);
    CUDA_LAUNCH("layout", layout_kernel, blocks_for(to.capacity / 16384, 1), kBlock, stream, work_->masks, work_->state,
                key, work_->scratch, work_->records, message);
    CUDA_LAUNCH("write", write_kernel<Residual>, chunk_blocks, kBlock, stream, work_->masks, residual, work_->state,
                work_->scratch, work_->records, message);
    if (policy_.clip_every == 0) return;
    CUDA_LAUNCH("clip", clip_kernel<Residual>, blocks_for(numel_ / kBlock, 8), kBlock, stream, residual, numel_,
                policy_.clip_limit, work_->scratch, work_->state);
}

template <class Residual>
void DeviceEncoder::send_values(DenseType dtype, uint32_t key, bool skip_nonfinite, MessageBuffer& to,
                                cudaStream_t stream) {
    CUDA_LAUNCH("plan", plan_kernel, 1, kPlanBlock, stream, work_->masks, work_->state, skip_nonfinite, work_->scratch);
    CUDA_LAUNCH("values", values_kernel<Residual>, blocks_for(numel_ / kBlock, 8), kBlock, stream,
                reinterpret_cast<Residual*>(work_->residual), numel_, dtype, key, work_->state, work_->scratch,
                to.on_device);
}

template <class Residual>
void DeviceEncoder::encode_as(const std::vector<ConstArray>* update, uint32_t key, bool skip_nonfinite, DenseType dense,
                              MessageBuffer& to, cudaStream_t stream) {
    const bool is_dense = dense != DenseType::kNone;
    if (!is_dense && policy_.rule == Rule::kTargetDensity && numel_ > 0) sample<Residual>(update, stream);
    extract<Residual>(update, is_dense, stream);
    if (is_dense)
        send_values<Residual>(dense, key, skip_nonfinite, to, stream);
    else
        encode_ternary<Residual>(key, skip_nonfinite, to, stream);
    CUDA_LAUNCH("seal", seal_kernel, blocks_for(to.capacity / (kBlock * kCrcSlice), 2), kBlock, stream, to.on_device,
                numel_, policy_, !is_dense, work_->scratch, work_->state, to.status);
    if (!to.on_host) return;
    CUDA_LAUNCH("publish", publish_kernel, blocks_for(to.capacity / (kBlock * 16), 1), kBlock, stream,
                reinterpret_cast<const uint4*>(to.on_device), work_->scratch, reinterpret_cast<uint4*>(to.on_host));
}

void DeviceEncoder::encode(const std::vector<ConstArray>* update, uint32_t key, bool skip_nonfinite, DenseType dense,
                           MessageBuffer& to, cudaStream_t stream) {
    const DeviceScope scope(device_);
    to.begin_use(stream);
    if (dtype_ == Dtype::kFloat64)
        encode_as<double>(update, key, skip_nonfinite, dense, to, stream);
    else
        encode_as<float>(update, key, skip_nonfinite, dense, to, stream);
    to.end_use(stream);
}

void DeviceEncoder::encode_into(void* residual, const std::vector<ConstArray>& update, uint16_t threshold, uint32_t key,
                                uint32_t step, MessageBuffer& to, cudaStream_t stream) {
    const DeviceScope scope(device_);
    CUDA_LAUNCH("begin", begin_kernel, 1, 1, stream, work_->state, threshold, step);
    work_->residual = static_cast<uint8_t*>(residual);
    encode(&update, key, true, DenseType::kNone, to, stream);
}

}  // namespace gradwire::cuda
