// Python arrays as plain pointers, without a copy: NumPy arrays, buffers and DLPack producers in host memory.
//
// What cannot be taken as it is gets refused: TypeError for a wrong dtype, ValueError for a wrong device, layout,
// overlap or a read-only target. While a HostArrays lives, the memory behind it stays alive.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <memory>
#include <string>
#include <vector>

#include "../codec.h"

namespace gradwire::bindings {

namespace py = pybind11;

struct HostArray {
    void* data = nullptr;
    uint64_t numel = 0;
    Dtype dtype = Dtype::kNone;
    bool writable = false;
    std::shared_ptr<void> hold;  // keeps a borrowed buffer or DLPack tensor

    uint64_t bytes() const;
};

// One array or a list or tuple of arrays. `role` ("update", "target") begins every error.
class HostArrays {
  public:
    HostArrays(py::handle object, const char* role);

    uint64_t numel() const;
    void require_numel(uint64_t numel) const;
    void require_targets() const;
    void require_updates(Dtype residual) const;
    void require_apart(const void* data, uint64_t bytes, const char* what) const;

    std::vector<ConstArray> updates() const;
    std::vector<Array> targets() const;

  private:
    std::string name(size_t index) const;
    std::vector<HostArray> arrays_;
    const char* role_;
    bool sequence_;
};

}  // namespace gradwire::bindings
