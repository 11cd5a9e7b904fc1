// The part of the CUDA runtime that gradwire uses, on the CPU (runtime.cpp). Names and semantics are NVIDIA's: CUDA
// Runtime API reference, 12 and 13.
#pragma once

#include <cstddef>
#include <cstdint>

#define CUDART_VERSION 13000
#define EMULATED_API extern "C" __attribute__((visibility("default")))

enum cudaError_t {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorInsufficientDriver = 35,
    cudaErrorInvalidConfiguration = 9,
    cudaErrorNoDevice = 100,
    cudaErrorInvalidDevice = 101,
    cudaErrorNotReady = 600,
    cudaErrorStreamCaptureUnsupported = 900,
};

using cudaStream_t = struct EmulatedStream*;
using cudaEvent_t = struct EmulatedEvent*;
using cudaGraph_t = struct EmulatedGraph*;
using cudaMemPool_t = struct EmulatedPool*;
using cudaHostFn_t = void (*)(void*);

enum cudaMemcpyKind { cudaMemcpyHostToHost, cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice };
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount = 16 };
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone, cudaStreamCaptureStatusActive };
enum cudaMemoryType { cudaMemoryTypeUnregistered, cudaMemoryTypeHost, cudaMemoryTypeDevice, cudaMemoryTypeManaged };
enum cudaMemAllocationType { cudaMemAllocationTypePinned = 1 };
enum cudaMemLocationType { cudaMemLocationTypeDevice = 1 };
enum cudaMemPoolAttr { cudaMemPoolAttrReleaseThreshold = 4 };
constexpr unsigned cudaEventDisableTiming = 2;
constexpr unsigned cudaStreamNonBlocking = 1;

struct cudaPointerAttributes {
    cudaMemoryType type;
    int device;
};
struct cudaMemPoolProps {
    cudaMemAllocationType allocType;
    struct {
        cudaMemLocationType type;
        int id;
    } location;
};

EMULATED_API cudaError_t cudaDriverGetVersion(int* version);
EMULATED_API cudaError_t cudaGetDeviceCount(int* count);
EMULATED_API cudaError_t cudaGetDevice(int* device);
EMULATED_API cudaError_t cudaSetDevice(int device);
EMULATED_API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
EMULATED_API cudaError_t cudaDeviceSynchronize();
EMULATED_API cudaError_t cudaGetLastError();
EMULATED_API const char* cudaGetErrorName(cudaError_t error);
EMULATED_API const char* cudaGetErrorString(cudaError_t error);

EMULATED_API cudaError_t cudaMalloc(void** memory, size_t bytes);
EMULATED_API cudaError_t cudaFree(void* memory);
EMULATED_API cudaError_t cudaMallocHost(void** memory, size_t bytes);
EMULATED_API cudaError_t cudaFreeHost(void* memory);
EMULATED_API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* memory);
EMULATED_API cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind);
EMULATED_API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                                         cudaStream_t stream);
EMULATED_API cudaError_t cudaMemset(void* memory, int value, size_t bytes);
EMULATED_API cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t stream);
EMULATED_API cudaError_t cudaMemPoolCreate(cudaMemPool_t* pool, const cudaMemPoolProps* properties);
EMULATED_API cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, cudaMemPoolAttr attribute, void* value);
EMULATED_API cudaError_t cudaMallocFromPoolAsync(void** memory, size_t bytes, cudaMemPool_t pool, cudaStream_t stream);
EMULATED_API cudaError_t cudaFreeAsync(void* memory, cudaStream_t stream);

EMULATED_API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags);
EMULATED_API cudaError_t cudaStreamSynchronize(cudaStream_t stream);
EMULATED_API cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags);
EMULATED_API cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data);
EMULATED_API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags);
EMULATED_API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
EMULATED_API cudaError_t cudaEventQuery(cudaEvent_t event);
EMULATED_API cudaError_t cudaEventSynchronize(cudaEvent_t event);
EMULATED_API cudaError_t cudaEventDestroy(cudaEvent_t event);

EMULATED_API cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status);
EMULATED_API cudaError_t cudaStreamBeginCapture(cudaStream_t stream, int mode);
EMULATED_API cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph);
// Replaces instantiation and launch.
EMULATED_API cudaError_t emulatedGraphLaunch(cudaGraph_t graph, cudaStream_t stream);

// Enqueue slow work: later work runs only when the host waits for it.
EMULATED_API cudaError_t emulatedSleep(cudaStream_t stream);

// Return how often the host has waited for the device; set the random order of threads and streams.
EMULATED_API uint64_t emulatedWaits();
EMULATED_API uint64_t emulatedCopiedBytes();
EMULATED_API cudaError_t emulatedSeed(uint64_t seed);
