// CUDA_TRY for every call of the CUDA runtime: an exception with the call, its place and the error, which it clears.
#pragma once

#include <cuda_runtime_api.h>

#include <cstring>
#include <stdexcept>
#include <string>

namespace gradwire::cuda {

struct CudaError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

inline void check_call(cudaError_t error, const char* call, const char* file, int line) {
    if (error == cudaSuccess) return;
    cudaGetLastError();  // clears the error
    const char* slash = std::strrchr(file, '/');
    throw CudaError(std::string(slash ? slash + 1 : file) + ":" + std::to_string(line) + ": " + call + ": " +
                    cudaGetErrorName(error) + ": " + cudaGetErrorString(error));
}

// Makes a device the current one within a scope.
class DeviceScope {
  public:
    explicit DeviceScope(int device);
    ~DeviceScope();
    DeviceScope(const DeviceScope&) = delete;
    DeviceScope& operator=(const DeviceScope&) = delete;

  private:
    int before_ = 0;
    bool changed_ = false;
};

}  // namespace gradwire::cuda

#define CUDA_TRY(call) ::gradwire::cuda::check_call((call), #call, __FILE__, __LINE__)
