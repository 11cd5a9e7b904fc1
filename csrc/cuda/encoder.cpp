#include "encoder.h"

#include <algorithm>

#include "crc.h"
#include "encode_kernels.h"
#include "launch.h"
#include "layout.h"
#include "quantile_sample.h"
#include "ranges.h"

namespace gradwire::cuda {

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

DeviceEncoder::DeviceEncoder(int device, uint64_t numel, Dtype dtype, const Policy& policy,
                             const PolicyState& policy_state, bool keeps_residual)
    : device_(device), numel_(numel), dtype_(dtype), policy_(policy) {
    allocate(keeps_residual ? numel * bytes_per_element(dtype) : 0);
    if (!keeps_residual) lend_residual(nullptr);
    set_state(policy_state, 0, 0);
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

void DeviceEncoder::lend_residual(void* residual) { work_->residual = static_cast<uint8_t*>(residual); }

void* DeviceEncoder::residual() const { return work_->residual; }

EncoderState DeviceEncoder::state() {
    const DeviceScope scope(device_);
    EncoderState state;
    CUDA_TRY(cudaDeviceSynchronize());  // a copy does not wait for non-blocking streams
    CUDA_TRY(cudaMemcpy(&state, work_->state, sizeof state, cudaMemcpyDeviceToHost));
    return state;
}

void DeviceEncoder::set_state(const PolicyState& policy_state, uint64_t step, uint64_t changed_at) {
    EncoderState state = this->state();
    state.threshold = policy_state.threshold;
    state.trend = policy_state.trend;
    state.deviation = policy_state.deviation;
    state.supply = policy_state.supply;
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
    const auto launch = [&](Dtype dtype, const ArrayTable& updates, uint64_t begin, uint64_t end) {
        const uint64_t blocks = (end - begin + kGroupElements - 1) / kGroupElements;
        CUDA_LAUNCH("extract", encode_kernels<Residual>().extract[static_cast<unsigned>(dtype)],
                    static_cast<unsigned>(blocks), kBlock, stream, updates, to, work_->state, policy_.rounding_point,
                    begin / kGroupElements, dense);
    };
    if (numel_ == 0) return;
    if (!update) return launch(Dtype::kNone, ArrayTable{}, 0, numel_);
    // Tiles of other types than the first array's are read element by element, which is slower.
    for (const ArrayRange& range : cut_ranges(*update, numel_, kGroupElements))
        launch(static_cast<Dtype>(range.arrays.dtypes[0]), range.arrays, range.begin, range.end);
}

template <class Residual>
void DeviceEncoder::sample(const std::vector<ConstArray>* update, cudaStream_t stream) {
    const EncodeKernels<Residual>& kernels = encode_kernels<Residual>();
    CUDA_LAUNCH("clear_sample", kernels.clear_sample, 1, 1, stream, work_->state);
    const auto* residual = reinterpret_cast<const Residual*>(work_->residual);
    const uint64_t stride = sample_stride(numel_, policy_.density);
    const auto launch = [&](const ArrayTable& updates, uint64_t begin, uint64_t end) {
        const uint64_t groups = (end - begin) / stride + 1;
        CUDA_LAUNCH("sample", kernels.sample, static_cast<unsigned>((groups + kBlock - 1) / kBlock), kBlock, stream,
                    updates, residual, begin, end, numel_, stride, work_->bins, policy_, work_->state);
    };
    if (update)
        for (const ArrayRange& range : cut_ranges(*update, numel_, kGroupElements))
            launch(range.arrays, range.begin, range.end);
    else
        launch(ArrayTable{}, 0, numel_);
    CUDA_LAUNCH("quantile", kernels.quantile, kSampleQuantiles, kBlock, stream, work_->bins, policy_, work_->state);
    CUDA_LAUNCH("learn", kernels.learn, 1, 1, stream, policy_, work_->state);
}

// Return a budget, or where there is none the limit of the policy.
Budget DeviceEncoder::limited(const Budget& budget) const {
    if (budget.max_bytes != UINT64_MAX || policy_.rule != Rule::kTargetDensity) return budget;
    const uint64_t most = most_of_target(policy_.density, numel_);
    return most < numel_ ? Budget{UINT64_MAX, most, true} : budget;
}

// Extract fewer elements where the messages are too large.
template <class Residual>
void DeviceEncoder::keep_to_budget(const std::vector<PartTable>& tables, const Partition& partition,
                                   const Budget& budget, cudaStream_t stream) {
    const EncodeKernels<Residual>& kernels = encode_kernels<Residual>();
    auto* residual = reinterpret_cast<Residual*>(work_->residual);
    Selection* selection = work_->selection;
    const Masks& whole = work_->whole.masks;
    const auto words = static_cast<unsigned>((whole.tile_count() * kTileWords + kBlock - 1) / kBlock);
    const auto groups = static_cast<unsigned>(tables[0].parts[0].masks.group_total());
    for (const PartTable& table : tables)
        CUDA_LAUNCH("weigh", kernels.weigh, 1, 1, stream, table, budget, work_->state, selection);
    CUDA_LAUNCH("put_back", kernels.put_back, words, kBlock, stream, whole, residual, work_->state, work_->magnitudes,
                selection);
    CUDA_LAUNCH("choose", kernels.choose, 1, kPlanBlock, stream, work_->magnitudes, budget.most_changed,
                policy_.rounding_point, selection, work_->state);
    for (const PartTable& table : tables) {
        CUDA_LAUNCH("count_ties", kernels.count_ties, dim3(groups, table.count), kBlock, stream, table, partition,
                    residual, selection);
        CUDA_LAUNCH("plan", kernels.plan, dim3(1, table.count), kPlanBlock, stream, table, work_->state, true,
                    work_->totals, selection);
        CUDA_LAUNCH("order_ties", kernels.order_ties, 1, 1, stream, table, selection);
    }
    for (const PartTable& table : tables) {
        CUDA_LAUNCH("keep_largest", kernels.keep_largest, dim3(groups, table.count), kBlock, stream, table, partition,
                    residual, selection, work_->state);
        CUDA_LAUNCH("plan", kernels.plan, dim3(1, table.count), kPlanBlock, stream, table, work_->state, true,
                    work_->totals, selection);
    }
}

// All parts have messages of at most the size of part 0.
template <class Residual>
void DeviceEncoder::encode_ternary(const std::vector<PartTable>& tables, const Partition& partition,
                                   const Budget& budget, uint32_t key, cudaStream_t stream) {
    const EncodeKernels<Residual>& kernels = encode_kernels<Residual>();
    auto* residual = reinterpret_cast<Residual*>(work_->residual);
    const uint64_t largest = tables[0].parts[0].masks.numel;
    const unsigned chunk_blocks = blocks_for(most_chunks(largest), 6);
    const unsigned layout_blocks = blocks_for(max_ternary_bytes(largest) / 16384, 1);
    const auto lay_out = [&](const Selection* only_over) {
        for (const PartTable& table : tables) {
            CUDA_LAUNCH("size", kernels.size, dim3(chunk_blocks, table.count), kBlock, stream, table, only_over);
            CUDA_LAUNCH("layout", kernels.layout, dim3(layout_blocks, table.count), kBlock, stream, table, work_->state,
                        key, only_over);
        }
    };
    if (budget.is_policy && numel_ > 0) keep_to_budget<Residual>(tables, partition, budget, stream);
    lay_out(nullptr);
    if (budget.max_bytes != UINT64_MAX && numel_ > 0) {
        keep_to_budget<Residual>(tables, partition, budget, stream);
        lay_out(work_->selection);
    }
    for (const PartTable& table : tables)
        CUDA_LAUNCH("write", kernels.write, dim3(chunk_blocks, table.count), kBlock, stream, table, work_->whole.masks,
                    residual, work_->state);
    if (policy_.clip_every == 0) return;
    CUDA_LAUNCH("clip", kernels.clip, blocks_for(numel_ / kBlock, 8), kBlock, stream, residual, numel_,
                policy_.clip_limit, tables[0].parts[0].scratch, work_->state);
}

template <class Residual>
void DeviceEncoder::encode_as(const std::vector<ConstArray>* update, uint32_t key, bool skip_nonfinite, DenseType dense,
                              const Partition& partition, const Budget& budget, const std::vector<MessageBuffer*>& to,
                              cudaStream_t stream) {
    const EncodeKernels<Residual>& kernels = encode_kernels<Residual>();
    const std::vector<PartTable> tables = part_tables(*work_, partition, to);
    const PartWork& largest = tables[0].parts[0];
    const uint64_t capacity = to[0]->capacity;
    const bool is_dense = dense != DenseType::kNone;
    if (!is_dense && policy_.rule == Rule::kTargetDensity && numel_ > 0) sample<Residual>(update, stream);
    extract<Residual>(update, is_dense, stream);
    for (const PartTable& table : tables) {
        if (partition.parts > 1 && numel_ > 0)
            CUDA_LAUNCH("deal", kernels.deal, dim3(static_cast<unsigned>(largest.masks.group_total()), table.count),
                        kBlock, stream, work_->whole.masks, partition, table);
        CUDA_LAUNCH("plan", kernels.plan, dim3(1, table.count), kPlanBlock, stream, table, work_->state, skip_nonfinite,
                    work_->totals, nullptr);
        if (is_dense)
            CUDA_LAUNCH("values", kernels.values, dim3(blocks_for(largest.masks.numel / kBlock, 8), table.count),
                        kBlock, stream, table, partition, reinterpret_cast<Residual*>(work_->residual), dense, key,
                        work_->state);
    }
    if (!is_dense) encode_ternary<Residual>(tables, partition, limited(budget), key, stream);
    for (const PartTable& table : tables)
        CUDA_LAUNCH("seal", kernels.seal, dim3(blocks_for(capacity / (kBlock * kCrcSlice), 2), table.count), kBlock,
                    stream, table, static_cast<uint32_t>(partition.parts), numel_, policy_, !is_dense, work_->totals,
                    work_->state);
    for (const PartTable& table : tables)
        if (table.parts[0].copy)
            CUDA_LAUNCH("publish", kernels.publish, dim3(blocks_for(capacity / (kBlock * 16), 1), table.count), kBlock,
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
    CUDA_LAUNCH("begin", encode_kernels<float>().begin, 1, 1, stream, work_->state, threshold, step);
    work_->residual = static_cast<uint8_t*>(residual);
    encode(&update, key, true, DenseType::kNone, undivided(numel_), Budget{}, {&to}, stream);
}

}  // namespace gradwire::cuda
