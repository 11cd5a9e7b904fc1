#include "device_arrays.h"

#include <pybind11/stl.h>

#include <optional>

#include "../cuda/check.h"
#include "dlpack.h"

namespace gradwire::bindings {
namespace {

constexpr int kNoOrder = -1;  // in place of a stream: the producer is to order nothing

// Return the int for a stream in Python's protocols: 1 is the legacy default stream, which is 0 in CUDA.
py::object stream_number(cudaStream_t stream) {
    const auto number = reinterpret_cast<uintptr_t>(stream);
    return py::int_(number == 0 ? 1 : number);
}

bool is_on_cuda(int dlpack_type) { return dlpack_type == kDlpackCuda || dlpack_type == kDlpackCudaManaged; }

// Return (type, id) of a DLPack producer; (0, 0) for other objects.
std::pair<int, int> dlpack_device_of(py::handle object) {
    if (!py::hasattr(object, "__dlpack_device__")) return {0, 0};
    return object.attr("__dlpack_device__")().cast<std::pair<int, int>>();
}

int device_of_pointer(const void* data) {
    cudaPointerAttributes attributes{};
    CUDA_TRY(cudaPointerGetAttributes(&attributes, data));
    return attributes.type == cudaMemoryTypeDevice || attributes.type == cudaMemoryTypeManaged ? attributes.device : -1;
}

// Make `stream` wait for the present work on `producer`.
void wait_for(cudaStream_t producer, cudaStream_t stream) {
    if (producer == stream) return;
    cudaEvent_t event = nullptr;
    CUDA_TRY(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    const cudaError_t recorded = cudaEventRecord(event, producer);
    const cudaError_t waiting = recorded == cudaSuccess ? cudaStreamWaitEvent(stream, event, 0) : recorded;
    cudaEventDestroy(event);
    CUDA_TRY(waiting);
}

Dtype interface_dtype(const std::string& typestr, const std::string& name) {
    if (typestr == "<f4") return Dtype::kFloat32;
    if (typestr == "<f8") return Dtype::kFloat64;
    if (typestr == "<f2") return Dtype::kFloat16;
    refuse_dtype(name, typestr + " (CUDA array interface)");
}

void require_contiguous(const py::dict& interface, const std::vector<int64_t>& shape, int64_t itemsize,
                        const std::string& name) {
    if (!interface.contains("strides") || interface["strides"].is_none()) return;
    const auto strides = interface["strides"].cast<std::vector<int64_t>>();
    int64_t expected = itemsize;
    for (size_t i = shape.size(); i-- > 0;) {
        if (shape[i] != 1 && strides.at(i) != expected) refuse_layout(name);
        expected *= shape[i];
    }
}

HostArray from_interface(py::handle object, const std::string& name, cudaStream_t stream) {
    const py::dict interface = object.attr("__cuda_array_interface__");
    HostArray result;
    const auto typestr = interface["typestr"].cast<std::string>();
    result.dtype = interface_dtype(typestr, name);
    const auto shape = interface["shape"].cast<std::vector<int64_t>>();
    result.numel = 1;
    for (const int64_t length : shape) result.numel *= static_cast<uint64_t>(length);
    require_contiguous(interface, shape, typestr[2] - '0', name);
    const auto [address, read_only] = interface["data"].cast<std::pair<uintptr_t, bool>>();
    result.data = reinterpret_cast<void*>(address);
    result.writable = !read_only;
    if (interface["version"].cast<int>() >= 3 && interface.contains("stream") && !interface["stream"].is_none())
        wait_for(reinterpret_cast<cudaStream_t>(interface["stream"].cast<uintptr_t>()), stream);
    return result;
}

std::string text_of(const py::object& object) { return py::cast<std::string>(py::str(object)); }

// Whether torch made the array: it orders its stream, once for all of its arrays, and that takes long.
bool is_torchs(py::handle object) {
    const auto module = text_of(py::type::of(object).attr("__module__"));
    return module == "torch" || module.rfind("torch.", 0) == 0;
}

Dtype tensor_dtype(const std::string& name) {
    if (name == "torch.float32") return Dtype::kFloat32;
    if (name == "torch.float64") return Dtype::kFloat64;
    if (name == "torch.float16") return Dtype::kFloat16;
    if (name == "torch.bfloat16") return Dtype::kBfloat16;
    return Dtype::kNone;
}

// Return a plain tensor on a device; nothing for any other, which DLPack has to lend, or to refuse in its own words.
// DLPack takes several times as long to say the same, which adds up where a model has many tensors.
std::optional<HostArray> from_tensor(py::handle object, int device) {
    if (text_of(py::type::of(object).attr("__qualname__")) != "Tensor") return std::nullopt;
    try {
        const bool is_plain = object.attr("is_cuda").cast<bool>() && !object.attr("requires_grad").cast<bool>() &&
                              object.attr("device").attr("index").cast<int>() == device &&
                              object.attr("is_contiguous")().cast<bool>();
        HostArray array;
        array.dtype = is_plain ? tensor_dtype(text_of(object.attr("dtype"))) : Dtype::kNone;
        if (array.dtype == Dtype::kNone) return std::nullopt;
        array.data = reinterpret_cast<void*>(object.attr("data_ptr")().cast<uintptr_t>());
        array.numel = object.attr("numel")().cast<uint64_t>();
        array.writable = true;
        return array;
    } catch (const py::error_already_set&) {  // a layout without memory of this kind
        return std::nullopt;
    }
}

// `is_ordered`: whether the stream waits for torch already.
HostArray borrow_device_array(py::handle object, const std::string& name, int device, cudaStream_t stream,
                              bool& is_ordered) {
    const std::string here = "cuda:" + std::to_string(device);
    const bool by_torch = is_torchs(object);
    if (by_torch && is_ordered) {
        if (std::optional<HostArray> array = from_tensor(object, device)) return *array;
    }
    const cuda::DeviceScope scope(device);  // torch lends nothing of another device than the current one
    const auto [type, id] = dlpack_device_of(object);
    HostArray array;
    int found = -1;
    if (is_on_cuda(type)) {
        found = id;
        if (found == device) {
            const py::object order = by_torch && is_ordered ? py::int_(kNoOrder) : stream_number(stream);
            array = from_dlpack_capsule(object, dlpack_capsule(object, order, name), name);
            is_ordered = is_ordered || by_torch;
        }
    } else if (py::hasattr(object, "__cuda_array_interface__")) {
        array = from_interface(object, name, stream);
        found = array.numel > 0 ? device_of_pointer(array.data) : device;
    } else {
        throw py::value_error(name + " is not on a CUDA device, but this encoder or target is on " + here);
    }
    if (found != device)
        throw py::value_error(name + " is on cuda:" + std::to_string(found) + ", but this encoder or target is on " +
                              here);
    return array;
}

struct Lent {
    DlpackManaged managed;
    int64_t shape[1];
    PyObject* owner;
};

}  // namespace

DeviceArrays::DeviceArrays(py::handle object, const char* role, int device, cudaStream_t stream)
    : HostArrays(object, role, [&, is_ordered = false](py::handle item, const std::string& name) mutable {
          return borrow_device_array(item, name, device, stream, is_ordered);
      }) {}

int device_of(py::handle object) {
    if (PyList_Check(object.ptr()) || PyTuple_Check(object.ptr())) {
        const auto items = py::reinterpret_borrow<py::sequence>(object);
        return items.size() > 0 ? device_of(py::object(items[0])) : -1;
    }
    const auto [type, id] = dlpack_device_of(object);
    if (is_on_cuda(type)) return id;
    if (type != 0 || !py::hasattr(object, "__cuda_array_interface__")) return -1;
    const py::dict interface = object.attr("__cuda_array_interface__");
    const auto [address, read_only] = interface["data"].cast<std::pair<uintptr_t, bool>>();
    if (address != 0) return device_of_pointer(reinterpret_cast<const void*>(address));
    int current = 0;
    CUDA_TRY(cudaGetDevice(&current));
    return current;
}

py::dict OwnArray::cuda_array_interface() const {
    py::dict interface;
    interface["shape"] = py::make_tuple(numel_);
    interface["typestr"] = typestr_;
    interface["data"] = py::make_tuple(reinterpret_cast<uintptr_t>(data_), false);
    interface["strides"] = py::none();
    interface["version"] = 3;
    interface["stream"] = py::none();  // the consumer orders its stream
    return interface;
}

std::string OwnArray::dtype() const { return (typestr_[1] == 'f' ? "float" : "uint") + std::to_string(8 * itemsize()); }

// The capsule keeps the array and its owner alive until the consumer is done.
py::capsule OwnArray::dlpack(const py::object& self) const {
    auto* lent = new Lent{};
    lent->shape[0] = static_cast<int64_t>(numel_);
    lent->owner = self.inc_ref().ptr();
    const auto code = static_cast<uint8_t>(typestr_[1] == 'f' ? kDlpackFloat : kDlpackUnsigned);
    lent->managed.tensor = {
        data_, {kDlpackCuda, device_}, 1, {code, static_cast<uint8_t>(8 * itemsize()), 1}, lent->shape, nullptr, 0};
    lent->managed.manager_ctx = lent;
    lent->managed.deleter = [](DlpackManaged* managed) {
        auto* done = static_cast<Lent*>(managed->manager_ctx);
        const py::gil_scoped_acquire gil;
        Py_DECREF(done->owner);
        delete done;
    };
    return py::capsule(&lent->managed, "dltensor", [](PyObject* capsule) {
        if (!PyCapsule_IsValid(capsule, "dltensor")) return;  // consumed, and renamed by the consumer
        auto* managed = static_cast<DlpackManaged*>(PyCapsule_GetPointer(capsule, "dltensor"));
        managed->deleter(managed);
    });
}

void register_own_array(py::module_& module) {
    py::class_<OwnArray>(
        module, "DeviceArray",
        "A flat array on a device that CuPy, torch, JAX and Numba can use without a copy: DLPack and the CUDA "
        "array interface.")
        .def_property_readonly("__cuda_array_interface__", &OwnArray::cuda_array_interface)
        .def(
            "__dlpack__",
            [](const py::object& self, const py::object&, const py::kwargs&) {
                return self.cast<const OwnArray&>().dlpack(self);
            },
            py::arg("stream") = py::none())
        .def("__dlpack_device__", &OwnArray::dlpack_device)
        .def_property_readonly("shape", [](const OwnArray& array) { return py::make_tuple(array.numel()); })
        .def_property_readonly("dtype", &OwnArray::dtype)
        .def_property_readonly("device", &OwnArray::device);
}

}  // namespace gradwire::bindings
