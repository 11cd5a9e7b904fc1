// Kernel launches: the arguments are copied at once, and the kernel runs in the order of the stream.
#pragma once

#include <cuda_runtime.h>

#include <utility>

#include "check.h"

namespace gradwire::cuda {

template <class... Parameters, class... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), dim3 blocks, unsigned threads, cudaStream_t stream,
                   Arguments&&... arguments) {
    cudaLaunchConfig_t config{};
    config.gridDim = blocks;
    config.blockDim = dim3(threads);
    config.stream = stream;
    return cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...);
}

}  // namespace gradwire::cuda

// CUDA_LAUNCH(name, kernel, blocks, threads, stream, arguments...)
#define CUDA_LAUNCH(name, ...) \
    ::gradwire::cuda::check_call(::gradwire::cuda::launch(__VA_ARGS__), "launch of " name, __FILE__, __LINE__)
