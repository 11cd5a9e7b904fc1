#include "apply.h"

#include <algorithm>

#include "apply_kernels.h"
#include "launch.h"
#include "plan.h"
#include "ranges.h"

namespace gradwire::cuda {
namespace {

constexpr uint64_t kLeastCheckBlocks = 16;  // of one message of many

// Return how many blocks have a share of the work on messages of `numel` elements; a device holds no more at a time.
uint64_t blocks_for(uint64_t numel, int device) {
    int processors = 0;
    CUDA_TRY(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
    return std::min(most_chunks(numel), uint64_t{kApplyBlocks} * static_cast<unsigned>(processors));
}

}  // namespace

void apply_on_device(int device, const std::vector<DeviceMessageRef>& messages, const std::vector<Array>& targets,
                     const Part& part, double scale, cudaStream_t stream) {
    if (messages.empty()) return;
    const DeviceScope scope(device);
    const uint64_t numel = numel_of(part);
    const uint64_t blocks = blocks_for(numel, device);
    const auto count = static_cast<uint32_t>(messages.size());
    const ApplyKernels& kernels = apply_kernels();
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

    for (uint32_t first = 0; first < count; first += kMostMessages) {
        MessageTable table;
        StatusTable statuses;
        for (uint32_t i = first; i < std::min(count, first + kMostMessages); ++i, ++table.count) {
            table.bytes[table.count] = messages[i].bytes;
            table.sizes[table.count] = messages[i].size;
            statuses.statuses[table.count] = messages[i].status;
        }
        CUDA_LAUNCH("read", kernels.read, table.count, kReadBlock, stream, table, work, first, numel, scale);
        const auto check_blocks = static_cast<unsigned>(std::max(blocks / table.count, kLeastCheckBlocks));
        CUDA_LAUNCH("check", kernels.check, dim3(check_blocks, table.count), kBlock, stream, table, statuses, work,
                    first);
    }
    for (const ArrayRange& range : cut_ranges(targets, part.partition.numel, 1)) {
        const uint64_t begin = numel_before(part, range.begin), end = numel_before(part, range.end);
        for (uint32_t i = 0; i < count && begin < end; ++i)
            CUDA_LAUNCH("apply", kernels.apply, static_cast<unsigned>(blocks), kBlock, stream,
                        ByteSource{messages[i].bytes, messages[i].size}, range.arrays, work, i, part, begin, end,
                        scale);
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
