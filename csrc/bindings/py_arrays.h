// Python arrays as plain pointers, without a copy: NumPy arrays, buffers and DLPack producers in host memory.
//
// Arrays that would need a copy are refused: TypeError for a wrong dtype, ValueError for a wrong device, layout,
// overlap or a read-only target. A HostArrays keeps its arrays and their memory alive, also if another thread empties
// the list that they were in.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "../common/arrays.h"
#include "../common/format.h"

namespace gradwire::bindings {

namespace py = pybind11;

// One array, in host memory or (device_arrays.h) in the memory of a device.
struct HostArray {
    void* data = nullptr;
    uint64_t numel = 0;
    Dtype dtype = Dtype::kNone;
    bool writable = false;
    std::shared_ptr<void> hold;  // the loan of a buffer or DLPack tensor

    uint64_t bytes() const;
};

// One array, or a list or tuple of arrays. `role` ("update", "target") is the first word of every error.
class HostArrays {
  public:
    HostArrays(py::handle object, const char* role);

    uint64_t numel() const;
    uint64_t bytes() const;
    void require_numel(uint64_t numel) const;
    void require_targets() const;
    void require_writable() const;
    // Check that the arrays are an update for a residual.
    void require_update(const void* residual, uint64_t numel, Dtype dtype) const;
    void require_apart(const void* data, uint64_t bytes, const char* what) const;
    // The same for many others: a model may have ten thousands of arrays.
    void require_apart(const std::vector<Array>& others, const std::string& what) const;

    std::vector<ConstArray> updates() const;
    std::vector<Array> targets() const;

  protected:
    using Borrow = std::function<HostArray(py::handle, const std::string& name)>;
    HostArrays(py::handle object, const char* role, const Borrow& borrow);

  private:
    std::string name(size_t index) const;
    const char* role_;
    bool sequence_;
    py::object objects_;  // the array, or a tuple of the arrays
    std::vector<HostArray> arrays_;
};

// Return parameters in half precision with their float32 copies, which are apart; throw where they are not such.
std::vector<HalfArray> half_arrays(const HostArrays& copies, const HostArrays& params);

// Return the type of a dense message of float32 or float64 values; `name` is "bfloat16" or that of the values' own
// type.
inline DenseType dense_type(const std::string& name, Dtype values) {
    if (name == "bfloat16") return DenseType::kBfloat16;
    return values == Dtype::kFloat64 ? DenseType::kFloat64 : DenseType::kFloat32;
}

// Helpers for readers of all kinds of arrays.
[[noreturn]] void refuse_dtype(const std::string& name, const std::string& dtype);
[[noreturn]] void refuse_layout(const std::string& name);

// Take the tensor out of a DLPack capsule that `object` produced.
HostArray from_dlpack_capsule(py::handle object, const py::object& capsule, const std::string& name);

// Call object.__dlpack__, for a capsule of version 1 if the producer supports it: only version 1 has a read-only flag.
// `stream` is passed on unless it is None.
py::object dlpack_capsule(py::handle object, const py::object& stream, const std::string& name);

}  // namespace gradwire::bindings
