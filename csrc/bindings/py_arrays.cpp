#include "py_arrays.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "dlpack.h"

namespace gradwire::bindings {
namespace {

const char* dtype_name(Dtype dtype) {
    switch (dtype) {
        case Dtype::kFloat32: return "float32";
        case Dtype::kFloat64: return "float64";
        case Dtype::kFloat16: return "float16";
        case Dtype::kBfloat16: return "bfloat16";
        case Dtype::kNone: break;
    }
    return "none";
}

Dtype numpy_dtype(const py::array& array, const std::string& name) {
    const py::dtype dtype = array.dtype();
    if (dtype.byteorder() != '>') {
        switch (dtype.num()) {
            case py::detail::npy_api::NPY_FLOAT_: return Dtype::kFloat32;
            case py::detail::npy_api::NPY_DOUBLE_: return Dtype::kFloat64;
            case 23: return Dtype::kFloat16;  // NPY_HALF
            default: break;
        }
        if (dtype.itemsize() == 2 && std::string(py::str(dtype)) == "bfloat16") return Dtype::kBfloat16;
    }
    refuse_dtype(name, py::str(dtype));
}

HostArray from_numpy(const py::array& array, const std::string& name) {
    HostArray result;
    result.dtype = numpy_dtype(array, name);
    if (!(array.flags() & py::array::c_style)) refuse_layout(name);
    result.data = const_cast<void*>(array.data());
    result.numel = static_cast<uint64_t>(array.size());
    result.writable = array.writeable();
    return result;
}

Dtype dlpack_dtype(const DlpackDtype& dtype, const std::string& name) {
    if (dtype.lanes == 1 && dtype.code == kDlpackFloat) {
        if (dtype.bits == 32) return Dtype::kFloat32;
        if (dtype.bits == 64) return Dtype::kFloat64;
        if (dtype.bits == 16) return Dtype::kFloat16;
    }
    if (dtype.lanes == 1 && dtype.code == kDlpackBfloat && dtype.bits == 16) return Dtype::kBfloat16;
    refuse_dtype(name, "code " + std::to_string(dtype.code) + " of " + std::to_string(dtype.bits) + " bits (DLPack)");
}

HostArray from_dlpack_tensor(const DlpackTensor& tensor, bool writable, const std::string& name) {
    HostArray result;
    result.dtype = dlpack_dtype(tensor.dtype, name);
    result.numel = 1;
    for (int32_t i = 0; i < tensor.ndim; ++i) result.numel *= static_cast<uint64_t>(tensor.shape[i]);
    int64_t expected = 1;
    for (int32_t i = tensor.ndim; tensor.strides && result.numel > 0 && i-- > 0;) {
        if (tensor.shape[i] != 1 && tensor.strides[i] != expected) refuse_layout(name);
        expected *= tensor.shape[i];
    }
    result.data = static_cast<uint8_t*>(tensor.data) + tensor.byte_offset;
    result.writable = writable;
    return result;
}

HostArray from_dlpack(py::handle object, const std::string& name) {
    const auto device = object.attr("__dlpack_device__")().cast<std::pair<int, int>>();
    if (device.first != kDlpackCpu)
        throw py::value_error(name + " is on device " + std::to_string(device.first) + ":" +
                              std::to_string(device.second) + " (DLPack), but this encoder or target is on the CPU");
    return from_dlpack_capsule(object, dlpack_capsule(object, py::none(), name), name);
}

HostArray from_buffer(py::handle object, const std::string& name) {
    auto view = std::shared_ptr<Py_buffer>(new Py_buffer{}, [](Py_buffer* buffer) {
        PyBuffer_Release(buffer);
        delete buffer;
    });
    if (PyObject_GetBuffer(object.ptr(), view.get(), PyBUF_FORMAT | PyBUF_C_CONTIGUOUS) != 0) {
        view->obj = nullptr;
        PyErr_Clear();
        refuse_layout(name);
    }
    HostArray result;
    std::string format = view->format ? view->format : "B";
    if (!format.empty() && (format[0] == '=' || format[0] == '<' || format[0] == '@')) format.erase(0, 1);
    if (format == "f")
        result.dtype = Dtype::kFloat32;
    else if (format == "d")
        result.dtype = Dtype::kFloat64;
    else if (format == "e")
        result.dtype = Dtype::kFloat16;
    else
        refuse_dtype(name, "format \"" + format + "\" (buffer protocol)");
    result.data = view->buf;
    result.numel = static_cast<uint64_t>(view->len) / bytes_per_element(result.dtype);
    result.writable = !view->readonly;
    result.hold = view;
    return result;
}

HostArray borrow(py::handle object, const std::string& name) {
    if (py::isinstance<py::array>(object)) return from_numpy(py::reinterpret_borrow<py::array>(object), name);
    if (py::hasattr(object, "__cuda_array_interface__"))
        throw py::value_error(name + " is on a CUDA device, but this encoder or target is on the CPU");
    if (py::hasattr(object, "__dlpack__")) return from_dlpack(object, name);
    if (PyObject_CheckBuffer(object.ptr())) return from_buffer(object, name);
    throw py::type_error(name + " is a " + std::string(py::str(py::type::of(object).attr("__name__"))) +
                         "; gradwire takes arrays with the buffer protocol or __dlpack__, or a list or tuple of them");
}

bool overlap(const void* a, uint64_t a_bytes, const void* b, uint64_t b_bytes) {
    const auto from_a = reinterpret_cast<uintptr_t>(a);
    const auto from_b = reinterpret_cast<uintptr_t>(b);
    return a_bytes > 0 && b_bytes > 0 && from_a < from_b + b_bytes && from_b < from_a + a_bytes;
}

struct Span {
    uintptr_t begin;
    uintptr_t end;
    size_t index;
};

// Return the memory of the arrays that have elements, in the order of addresses.
template <class AnyArray>
std::vector<Span> spans_of(const std::vector<AnyArray>& arrays) {
    std::vector<Span> spans;
    for (size_t i = 0; i < arrays.size(); ++i) {
        const auto begin = reinterpret_cast<uintptr_t>(arrays[i].data);
        if (arrays[i].numel > 0)
            spans.push_back({begin, begin + arrays[i].numel * bytes_per_element(arrays[i].dtype), i});
    }
    std::sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) { return a.begin < b.begin; });
    return spans;
}

}  // namespace

void refuse_dtype(const std::string& name, const std::string& dtype) {
    throw py::type_error(name + " has dtype " + dtype + "; gradwire takes float32, float64, float16 and bfloat16");
}

void refuse_layout(const std::string& name) {
    throw py::value_error(name + " is not C-contiguous; pass a contiguous array (numpy.ascontiguousarray copies one)");
}

py::object dlpack_capsule(py::handle object, const py::object& stream, const std::string& name) {
    py::dict arguments;
    if (!stream.is_none()) arguments["stream"] = stream;
    try {
        try {
            return object.attr("__dlpack__")(py::arg("max_version") = py::make_tuple(1, 0), **arguments);
        } catch (py::error_already_set& error) {
            if (!error.matches(PyExc_TypeError)) throw;
        }
        return object.attr("__dlpack__")(**arguments);
    } catch (py::error_already_set& error) {
        if (!error.matches(PyExc_BufferError) && !error.matches(PyExc_RuntimeError) && !error.matches(PyExc_TypeError))
            throw;
        throw py::value_error(name + " does not lend its memory: " + std::string(py::str(error.value())) +
                              " (a tensor that requires grad is passed as tensor.detach())");
    }
}

HostArray from_dlpack_capsule(py::handle object, const py::object& capsule, const std::string& name) {
    if (PyCapsule_IsValid(capsule.ptr(), "dltensor_versioned")) {
        auto* managed = static_cast<DlpackVersioned*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor_versioned"));
        HostArray result = from_dlpack_tensor(managed->tensor, !(managed->flags & kDlpackReadOnly), name);
        PyCapsule_SetName(capsule.ptr(), "used_dltensor_versioned");
        result.hold = std::shared_ptr<void>(managed, [](void* p) {
            auto* tensor = static_cast<DlpackVersioned*>(p);
            if (tensor->deleter) tensor->deleter(tensor);
        });
        return result;
    }
    auto* managed = static_cast<DlpackManaged*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"));
    if (!managed) throw py::error_already_set();
    // The old capsule has no read-only flag. JAX arrays are read-only and are recognised by their attribute `at`.
    HostArray result = from_dlpack_tensor(managed->tensor, !py::hasattr(object, "at"), name);
    PyCapsule_SetName(capsule.ptr(), "used_dltensor");
    result.hold = std::shared_ptr<void>(managed, [](void* p) {
        auto* tensor = static_cast<DlpackManaged*>(p);
        if (tensor->deleter) tensor->deleter(tensor);
    });
    return result;
}

uint64_t HostArray::bytes() const { return numel * bytes_per_element(dtype); }

HostArrays::HostArrays(py::handle object, const char* role) : HostArrays(object, role, borrow) {}

HostArrays::HostArrays(py::handle object, const char* role, const Borrow& borrow)
    : role_(role),
      sequence_(PyList_Check(object.ptr()) || PyTuple_Check(object.ptr())),
      objects_(py::reinterpret_borrow<py::object>(object)) {
    const auto add = [&](py::handle item, const std::string& name) {
        HostArray array = borrow(item, name);
        if (array.numel > 0 && reinterpret_cast<uintptr_t>(array.data) % bytes_per_element(array.dtype) != 0)
            throw py::value_error(name + " is not aligned to its " + std::to_string(bytes_per_element(array.dtype)) +
                                  "-byte elements");
        arrays_.push_back(std::move(array));
    };
    if (!sequence_) {
        add(object, role);
        return;
    }
    const py::tuple items(objects_);
    objects_ = items;
    for (size_t i = 0; i < items.size(); ++i) add(items[i], std::string(role) + "[" + std::to_string(i) + "]");
}

std::string HostArrays::name(size_t index) const {
    return sequence_ ? std::string(role_) + "[" + std::to_string(index) + "]" : role_;
}

uint64_t HostArrays::numel() const {
    uint64_t numel = 0;
    for (const HostArray& array : arrays_) numel += array.numel;
    return numel;
}

uint64_t HostArrays::bytes() const {
    uint64_t bytes = 0;
    for (const HostArray& array : arrays_) bytes += array.bytes();
    return bytes;
}

void HostArrays::require_numel(uint64_t expected) const {
    if (numel() != expected)
        throw py::value_error(std::string(role_) + " has " + std::to_string(numel()) + " elements, must have " +
                              std::to_string(expected));
}

void HostArrays::require_update(const void* residual, uint64_t residual_numel, Dtype dtype) const {
    require_numel(residual_numel);
    for (size_t i = 0; i < arrays_.size(); ++i)
        if (arrays_[i].dtype == Dtype::kFloat64 && dtype == Dtype::kFloat32)
            throw py::type_error(name(i) +
                                 " is float64, but the encoder's residual is float32: it would be rounded; "
                                 "use Encoder(..., dtype=\"float64\") or pass float32");
    require_apart(residual, residual_numel * bytes_per_element(dtype), "the residual");
}

void HostArrays::require_writable() const {
    for (size_t i = 0; i < arrays_.size(); ++i)
        if (!arrays_[i].writable) throw py::value_error(name(i) + " is read-only");
}

void HostArrays::require_targets() const {
    for (size_t i = 0; i < arrays_.size(); ++i) {
        const HostArray& array = arrays_[i];
        if (array.dtype != Dtype::kFloat32 && array.dtype != Dtype::kFloat64)
            throw py::type_error(name(i) + " is " + dtype_name(array.dtype) +
                                 ", which would round most updates away; apply to float32 or float64 (a master copy)");
        if (!array.writable) throw py::value_error(name(i) + " is read-only, so nothing can be added to it");
    }
    // If any overlap, then neighbours in the order of addresses do.
    const std::vector<Span> spans = spans_of(arrays_);
    for (size_t i = 1; i < spans.size(); ++i)
        if (spans[i].begin < spans[i - 1].end)
            throw py::value_error(name(spans[i - 1].index) + " and " + name(spans[i].index) + " overlap in memory");
}

void HostArrays::require_apart(const void* data, uint64_t bytes, const char* what) const {
    for (size_t i = 0; i < arrays_.size(); ++i)
        if (overlap(arrays_[i].data, arrays_[i].bytes(), data, bytes))
            throw py::value_error(name(i) + " overlaps " + what + " in memory");
}

void HostArrays::require_apart(const std::vector<Array>& others, const std::string& what) const {
    const std::vector<Span> own = spans_of(arrays_);
    const std::vector<Span> theirs = spans_of(others);
    for (size_t i = 0, j = 0; i < own.size() && j < theirs.size();) {
        if (own[i].begin < theirs[j].end && theirs[j].begin < own[i].end)
            throw py::value_error(name(own[i].index) + " overlaps " + what + " in memory");
        // What ends first overlaps none of those that begin later.
        if (own[i].end < theirs[j].end)
            ++i;
        else
            ++j;
    }
}

std::vector<ConstArray> HostArrays::updates() const {
    std::vector<ConstArray> result;
    result.reserve(arrays_.size());
    for (const HostArray& array : arrays_) result.push_back({array.data, array.numel, array.dtype});
    return result;
}

std::vector<Array> HostArrays::targets() const {
    std::vector<Array> result;
    result.reserve(arrays_.size());
    for (const HostArray& array : arrays_) result.push_back({array.data, array.numel, array.dtype});
    return result;
}

std::vector<HalfArray> half_arrays(const HostArrays& copies, const HostArrays& params) {
    copies.require_targets();
    const std::vector<Array> floats = copies.targets();
    const std::vector<ConstArray> halves = params.updates();
    const auto are_of_one_size = [](const Array& copy, const ConstArray& param) { return copy.numel == param.numel; };
    if (!std::equal(floats.begin(), floats.end(), halves.begin(), halves.end(), are_of_one_size))
        throw py::value_error("copies and params must be arrays of the same sizes");
    std::vector<HalfArray> pairs;
    for (size_t i = 0; i < floats.size(); ++i) {
        const Array& copy = floats[i];
        const bool is_half = halves[i].dtype == Dtype::kFloat16 || halves[i].dtype == Dtype::kBfloat16;
        if (copy.dtype != Dtype::kFloat32 || !is_half)
            throw py::type_error("copies must be float32, and params float16 or bfloat16");
        pairs.push_back(
            {const_cast<void*>(halves[i].data), static_cast<float*>(copy.data), copy.numel, halves[i].dtype});
    }
    params.require_apart(floats, "the copies");
    return pairs;
}

}  // namespace gradwire::bindings
