// Python arrays as plain pointers, without a copy: NumPy arrays, buffers and DLPack producers in host memory.
//
// What cannot be taken as it is gets refused: TypeError for a wrong dtype, ValueError for a wrong device, layout,
// overlap or a read-only target. While a HostArrays lives, the memory behind it stays alive.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "../codec.h"

namespace gradwire::bindings {

namespace py = pybind11;

// An array where it lies, in host memory or (device_arrays.h) a device's.
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
    uint64_t bytes() const;
    void require_numel(uint64_t numel) const;
    void require_targets() const;
    void require_updates(Dtype residual) const;
    void require_apart(const void* data, uint64_t bytes, const char* what) const;

    std::vector<ConstArray> updates() const;
    std::vector<Array> targets() const;

  protected:
    using Borrow = std::function<HostArray(py::handle, const std::string& name)>;
    HostArrays(py::handle object, const char* role, const Borrow& borrow);

  private:
    std::string name(size_t index) const;
    std::vector<HostArray> arrays_;
    const char* role_;
    bool sequence_;
};

// What a reader of any sort of array needs.
[[noreturn]] void refuse_dtype(const std::string& name, const std::string& dtype);
[[noreturn]] void refuse_layout(const std::string& name);

// Takes what DLPack's capsule holds; `object` lent it.
HostArray from_dlpack_capsule(py::handle object, const py::object& capsule, const std::string& name);

// Calls object.__dlpack__ for a capsule of version 1 where the producer knows it (only that one says "read-only");
// `stream` is passed on unless it is None.
py::object dlpack_capsule(py::handle object, const py::object& stream, const std::string& name);

}  // namespace gradwire::bindings
