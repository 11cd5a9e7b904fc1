#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <functional>

namespace emulated {

// Run a kernel to its end: call `kernel` for every thread.
void run_grid(dim3 blocks, dim3 threads, const std::function<void()>& kernel);

// Return a random number below `end`; set the seed.
uint64_t draw(uint64_t end);
void seed(uint64_t number);

}  // namespace emulated
