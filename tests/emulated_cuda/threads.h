#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <functional>

namespace emulated {

// Runs a kernel to its end: a call of `kernel` for every thread.
void run_grid(dim3 blocks, dim3 threads, const std::function<void()>& kernel);

// A number below `end`, and where such numbers begin.
uint64_t draw(uint64_t end);
void seed(uint64_t number);

}  // namespace emulated
