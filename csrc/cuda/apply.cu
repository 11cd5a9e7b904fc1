// The kernels of the decoder and their order.
//
//   read    a block for each message: header, directory
//   check   all bytes of the messages: checksum, the streams of every chunk
//   apply   one message after the other: a block for each chunk
//
// Memory traffic: the touched sectors of the target, read and written for each message.
#include "apply_kernels.h"

#include "crc_tables.cuh"
#include "device_team.cuh"

namespace gradwire::cuda {

__device__ CrcWork apply_crc = make_crc_work();

__global__ void __launch_bounds__(kReadBlock)
    read_kernel(const __grid_constant__ MessageTable table, Work work, uint32_t first, uint64_t numel, double scale) {
    __shared__ BlockScratch<kReadBlock> sums;
    __shared__ DirectoryShared shared;
    BlockTeam<kReadBlock> block(sums);
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
    load_crc_work(apply_crc, crc);
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

__global__ void __launch_bounds__(kBlock, kApplyBlocks)
    apply_kernel(ByteSource source, const __grid_constant__ ArrayTable targets, Work work, uint32_t index, Part part,
                 uint64_t begin, uint64_t end, double scale) {
    __shared__ BlockScratch<kBlock> sums;
    if (*work.failure != kSound) return;
    BlockTeam<kBlock> block(sums);
    apply_message(block, blockIdx.x, gridDim.x, source, work.messages[index], work.entries + index * work.entries_each,
                  scale, targets, part, begin, end);
}

const ApplyKernels& apply_kernels() {
    static const ApplyKernels kernels{read_kernel, check_kernel, apply_kernel};
    return kernels;
}

}  // namespace gradwire::cuda
