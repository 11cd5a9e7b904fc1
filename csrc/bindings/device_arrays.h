// Arrays in device memory, without a copy, and memory of this library as arrays for other libraries.
#pragma once

#include <cuda_runtime_api.h>

#include "py_arrays.h"

namespace gradwire::bindings {

// One array, or a list or tuple of arrays, on one device, through DLPack or the CUDA array interface. `stream` waits
// for the producer's work: DLPack producers order it themselves, and version 3 of the interface names its stream.
class DeviceArrays : public HostArrays {
  public:
    DeviceArrays(py::handle object, const char* role, int device, cudaStream_t stream);
};

// Return the device of an array, or of the first of a sequence; -1 if it is on none.
int device_of(py::handle object);

// A flat array of this library, kept alive by its owner: float32, float64 or uint8.
class OwnArray {
  public:
    OwnArray(py::object owner, void* data, uint64_t numel, const char* typestr, int device)
        : owner_(std::move(owner)), data_(data), numel_(numel), typestr_(typestr), device_(device) {}
    py::dict cuda_array_interface() const;
    py::capsule dlpack(const py::object& self) const;
    std::pair<int, int> dlpack_device() const { return {2, device_}; }
    uint64_t numel() const { return numel_; }
    uint64_t itemsize() const { return static_cast<uint64_t>(typestr_[2] - '0'); }
    void* data() const { return data_; }
    int device() const { return device_; }
    std::string dtype() const;

  private:
    py::object owner_;
    void* data_;
    uint64_t numel_;
    std::string typestr_;
    int device_;
};

void register_own_array(py::module_& module);

}  // namespace gradwire::bindings
