// The kernels of the decoder and their order.
//
//   read    a block for each message: header, directory
//   check   all bytes of the messages: checksum, the streams of every chunk
//   apply   a block for each window of the target: every message in order
//
// A chunk is decoded completely in every window that it overlaps. A chunk of 2^e changed elements takes one or two
// rounds of a block, so that storing where to begin would cost more. Memory traffic: the touched sectors of the target,
// read and written.
#include "apply.h"

#include <algorithm>

#include "crc_tables.cuh"
#include "decode_chunk.h"
#include "device_team.cuh"
#include "launch.cuh"
#include "plan.h"
#include "ranges.h"

namespace gradwire::cuda {
namespace {

constexpr unsigned kBlock = 256;
constexpr unsigned kMostMessages = 64;  // of one launch
constexpr unsigned kCheckBlocks = 64;   // of one message

struct MessageTable {
    uint32_t count = 0;
    const uint8_t* bytes[kMostMessages];
    uint64_t sizes[kMostMessages];

    __device__ ByteSource source(uint32_t i) const { return {bytes[i], sizes[i]}; }
};
static_assert(sizeof(MessageTable) + sizeof(ArrayTable) <= 4000, "fit beside a kernel's other arguments");

struct StatusTable {
    MessageStatus* statuses[kMostMessages];
};

// The totals of the checks of one message.
struct MessageChecks {
    uint32_t crc;
    uint32_t failure;
    uint32_t blocks_done;
};

// The memory of one call: a record for each message, and one word that stops all of them.
struct Work {
    ReadMessage* messages;
    MessageChecks* checks;
    ChunkEntry* entries;  // most_chunks(numel) for each message
    uint64_t entries_each;
    uint32_t* failure;
};

__global__ void __launch_bounds__(kBlock)
    read_kernel(const __grid_constant__ MessageTable table, Work work, uint32_t first, uint64_t numel, double scale) {
    __shared__ BlockScratch<kBlock> sums;
    __shared__ DirectoryShared shared;
    BlockTeam<kBlock> block(sums);
    const uint32_t index = first + blockIdx.x;
    read_message(block, table.source(blockIdx.x), numel, scale, work.messages + index,
                 work.entries + index * work.entries_each, shared);
}

__global__ void __launch_bounds__(kBlock, 3)
    check_kernel(const __grid_constant__ MessageTable table, const __grid_constant__ StatusTable statuses, Work work,
                 uint32_t first) {
    __shared__ BlockScratch<kBlock> sums;
    __shared__ CrcWork crc;
    __shared__ bool is_last;
    load_crc_work(crc);
    BlockTeam<kBlock> block(sums);
    const uint32_t index = first + blockIdx.y;
    const ReadMessage message = work.messages[index];
    MessageChecks& checks = work.checks[index];
    const ByteSource whole{table.bytes[blockIdx.y], kHeaderBytes + message.payload_bytes};
    if (message.failure == kSound) {
        add_slices(block, blockIdx.x, gridDim.x, crc.tables, crc.powers, whole, &checks.crc);
        const ByteSource stream{whole.bytes + kHeaderBytes + message.directory_bytes,
                                message.payload_bytes - message.directory_bytes};
        const ChunkEntry* entries = work.entries + index * work.entries_each;
        for (uint64_t i = blockIdx.x; i < message.chunks; i += gridDim.x) {
            const uint32_t failure = check_chunk(block, stream, OpenChunk(message, entries[i], i));
            if (threadIdx.x == 0 && failure != kSound) note_failure(&checks.failure, failure);
        }
    }
    if (threadIdx.x == 0) {
        __threadfence();
        is_last = atomicAdd(&checks.blocks_done, 1U) + 1 == gridDim.x;
    }
    __syncthreads();
    if (!is_last || threadIdx.x > 0) return;
    __threadfence();
    uint32_t failure = message.failure;
    if (failure == kSound && finish_crc(crc.tables, crc.powers, whole, atomicXor(&checks.crc, 0U)) != message.crc)
        failure = kBadChecksum;
    if (failure == kSound) failure = atomicOr(&checks.failure, 0U);
    if (failure == kSound) return;
    note_failure(work.failure, failure);
    if (statuses.statuses[blockIdx.y]) statuses.statuses[blockIdx.y]->failure = failure;
}

__global__ void __launch_bounds__(kBlock, 2)
    apply_kernel(const __grid_constant__ MessageTable table, const __grid_constant__ ArrayTable targets, Work work,
                 uint32_t first, Part part, uint64_t begin, uint64_t end, uint64_t window_elements, double scale) {
    __shared__ BlockScratch<kBlock> sums;
    if (*work.failure != kSound) return;
    BlockTeam<kBlock> block(sums);
    const uint64_t from = begin + blockIdx.x * window_elements;
    const Window window(targets, part, from, from + window_elements < end ? from + window_elements : end);
    for (uint32_t i = 0; i < table.count; ++i) {
        const uint32_t index = first + i;
        apply_message(block, table.source(i), work.messages[index], work.entries + index * work.entries_each, scale,
                      window);
    }
}

// Return the size of a window: enough windows to fill the device, none so small that decoding dominates.
uint64_t window_for(uint64_t numel, int device) {
    int processors = 0;
    CUDA_TRY(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
    const uint64_t wanted = numel / (static_cast<uint64_t>(processors) * 8) + 1;
    return std::clamp<uint64_t>((wanted + 2047) / 2048 * 2048, 4096, uint64_t{1} << 30);
}

}  // namespace

void apply_on_device(int device, const std::vector<DeviceMessageRef>& messages, const std::vector<Array>& targets,
                     const Part& part, double scale, cudaStream_t stream) {
    if (messages.empty()) return;
    const DeviceScope scope(device);
    const uint64_t numel = numel_of(part);
    const auto count = static_cast<uint32_t>(messages.size());
    Work work{};
    work.entries_each = most_chunks(numel);
    const uint64_t entries_bytes = count * work.entries_each * sizeof(ChunkEntry);
    const uint64_t messages_bytes = count * sizeof(ReadMessage);
    const uint64_t checks_bytes = count * sizeof(MessageChecks);
    const StreamMemory memory(entries_bytes + messages_bytes + checks_bytes + sizeof(uint32_t), stream);
    work.entries = reinterpret_cast<ChunkEntry*>(memory.get());
    work.messages = reinterpret_cast<ReadMessage*>(memory.get() + entries_bytes);
    work.checks = reinterpret_cast<MessageChecks*>(memory.get() + entries_bytes + messages_bytes);
    work.failure = reinterpret_cast<uint32_t*>(memory.get() + entries_bytes + messages_bytes + checks_bytes);
    CUDA_TRY(cudaMemsetAsync(work.checks, 0, checks_bytes + sizeof(uint32_t), stream));

    std::vector<MessageTable> tables;
    for (uint32_t first = 0; first < count; first += kMostMessages) {
        MessageTable table;
        StatusTable statuses;
        for (uint32_t i = first; i < std::min(count, first + kMostMessages); ++i, ++table.count) {
            table.bytes[table.count] = messages[i].bytes;
            table.sizes[table.count] = messages[i].size;
            statuses.statuses[table.count] = messages[i].status;
        }
        CUDA_LAUNCH("read", read_kernel, table.count, kBlock, stream, table, work, first, numel, scale);
        CUDA_LAUNCH("check", check_kernel, dim3(kCheckBlocks, table.count), kBlock, stream, table, statuses, work,
                    first);
        tables.push_back(table);
    }
    if (numel == 0) return;
    const uint64_t window = window_for(numel, device);
    for (const ArrayRange& range : cut_ranges(targets, part.partition.numel, window)) {
        const uint64_t begin = numel_before(part, range.begin), end = numel_before(part, range.end);
        const auto windows = static_cast<unsigned>((end - begin + window - 1) / window);
        for (uint32_t i = 0; i < tables.size() && windows > 0; ++i)
            CUDA_LAUNCH("apply", apply_kernel, windows, kBlock, stream, tables[i], range.arrays, work,
                        i * kMostMessages, part, begin, end, window, scale);
    }
}

const char* failure_text(uint32_t failure) {
    switch (failure) {
        case kBadHeader: return "its header breaks a rule of the format";
        case kBadNumel: return "its numel is not that of the target or part";
        case kTruncated: return "it is truncated";
        case kBadDirectory: return "its directory is inconsistent";
        case kBadChecksum: return "its checksum is wrong: the message is corrupt";
        case kBadStream: return "a chunk's streams are inconsistent";
        case kBadScale: return "scale times its threshold overflows float32";
        default: return "nothing is wrong with it";
    }
}

}  // namespace gradwire::cuda
