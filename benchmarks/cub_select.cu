// A peer for bench_cuda.py: what one writes with CUB. A kernel adds, compares and flags; DeviceSelect lists the flagged
// indices. No coding of any kind follows, so this does less than an encode.
#include <cstdint>
#include <cub/device/device_select.cuh>
#include <thrust/iterator/counting_iterator.h>

namespace {

__global__ void take(float4* residual, const float4* update, uchar4* flags, uint64_t fours, float threshold) {
    const uint64_t i = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (i >= fours) return;
    float4 r = residual[i];
    const float4 u = update[i];
    uchar4 flag;
    const auto one = [&](float& value, float more, unsigned char& out) {
        value += more;
        out = fabsf(value) >= threshold;
        if (out) value -= copysignf(threshold, value);
    };
    one(r.x, u.x, flag.x);
    one(r.y, u.y, flag.y);
    one(r.z, u.z, flag.z);
    one(r.w, u.w, flag.w);
    residual[i] = r;
    flags[i] = flag;
}

}  // namespace

// With `scratch` null: returns the bytes of scratch that are needed.
extern "C" uint64_t cub_encode(void* scratch, uint64_t scratch_bytes, float* residual, const float* update,
                               unsigned char* flags, uint32_t* indices, uint32_t* count, uint64_t numel,
                               float threshold, cudaStream_t stream) {
    if (scratch) {
        const uint64_t fours = numel / 4;
        take<<<static_cast<unsigned>((fours + 255) / 256), 256, 0, stream>>>(
            reinterpret_cast<float4*>(residual), reinterpret_cast<const float4*>(update),
            reinterpret_cast<uchar4*>(flags), fours, threshold);
    }
    size_t bytes = scratch_bytes;
    cub::DeviceSelect::Flagged(scratch, bytes, thrust::counting_iterator<uint32_t>(0), flags, indices, count,
                               static_cast<int64_t>(numel), stream);
    return bytes;
}
