#include "apply.h"

#include <algorithm>

#include "apply_kernels.h"
#include "launch.h"
#include "plan.h"
#include "ranges.h"

namespace gradwire::cuda {
namespace {

constexpr unsigned kCheckBlocks = 64;  // of one message

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

    std::vector<MessageTable> tables;
    for (uint32_t first = 0; first < count; first += kMostMessages) {
        MessageTable table;
        StatusTable statuses;
        for (uint32_t i = first; i < std::min(count, first + kMostMessages); ++i, ++table.count) {
            table.bytes[table.count] = messages[i].bytes;
            table.sizes[table.count] = messages[i].size;
            statuses.statuses[table.count] = messages[i].status;
        }
        CUDA_LAUNCH("read", kernels.read, table.count, kBlock, stream, table, work, first, numel, scale);
        CUDA_LAUNCH("check", kernels.check, dim3(kCheckBlocks, table.count), kBlock, stream, table, statuses, work,
                    first);
        tables.push_back(table);
    }
    if (numel == 0) return;
    const uint64_t window = window_for(numel, device);
    for (const ArrayRange& range : cut_ranges(targets, part.partition.numel, window)) {
        const uint64_t begin = numel_before(part, range.begin), end = numel_before(part, range.end);
        const auto windows = static_cast<unsigned>((end - begin + window - 1) / window);
        for (uint32_t i = 0; i < tables.size() && windows > 0; ++i)
            CUDA_LAUNCH("apply", kernels.apply, windows, kBlock, stream, tables[i], range.arrays, work,
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
