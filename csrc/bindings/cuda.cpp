// The module gradwire._cuda: check the inputs, release the GIL once, enqueue work. Only documented functions wait for
// the device.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cmath>
#include <map>

#include "../common/error.h"
#include "../common/scalars.h"
#include "../cuda/apply.h"
#include "../cuda/encoder.h"
#include "../cuda/half_precision.h"
#include "../cuda/ranges.h"
#include "../message.h"
#include "device_arrays.h"
#include "errors.h"
#include "exclusive.h"
#include "message_fields.h"
#include "parts.h"
#include "released_gil.h"

namespace gradwire::bindings {
namespace {

using cuda::DeviceScope;
using cuda::MessageBuffer;

cudaStream_t stream_of(uintptr_t number) { return reinterpret_cast<cudaStream_t>(number); }

void translate_cuda(std::exception_ptr pointer) {
    try {
        if (pointer) std::rethrow_exception(pointer);
    } catch (const cuda::CudaError& error) {
        set_error("CudaError", error.what());
    } catch (const cuda::TooManyArrays& error) {
        py::set_error(PyExc_ValueError, error.what());
    }
}

// Return why there is no usable device, or an empty string. Clears the error of the runtime.
std::string unusable() {
    int driver = 0, devices = 0;
    if (cudaDriverGetVersion(&driver) != cudaSuccess || driver == 0) {
        cudaGetLastError();
        return "no NVIDIA driver was found";
    }
    const cudaError_t error = cudaGetDeviceCount(&devices);
    if (error == cudaSuccess && devices > 0) return "";
    cudaGetLastError();
    if (error == cudaErrorInsufficientDriver)
        return "the NVIDIA driver supports CUDA " + std::to_string(driver / 1000) + "." +
               std::to_string(driver % 1000 / 10) + ", this build needs " + std::to_string(CUDART_VERSION / 1000) +
               ".0";
    return std::string("no NVIDIA GPU was found (") + cudaGetErrorString(error) + ")";
}

// A message in device memory, with or without a pinned copy.
class PyMessage {
  public:
    // `keeps` is the array that lends the memory, or None.
    PyMessage(std::shared_ptr<MessageBuffer> buffer, py::object keeps)
        : buffer_(std::move(buffer)), keeps_(std::move(keeps)) {}

    MessageBuffer& buffer() const { return *buffer_; }

    // Wait for the device, and throw if the update or the message was refused.
    void check() const {
        {
            const ReleasedGil release;
            buffer_->wait();
        }
        const cuda::MessageStatus& status = *buffer_->status;
        if (status.refused) throw NonFiniteUpdate(status.nonfinite, status.first_nonfinite);
        if (status.failure != 0)
            throw MessageError(std::string("the message was refused: ") + cuda::failure_text(status.failure));
    }

    // Return the message in host memory: the pinned copy, or a new copy.
    MessageView view() {
        check();
        if (buffer_->on_host) return read_message(buffer_->on_host, buffer_->capacity);
        if (copy_.empty()) {
            std::vector<uint8_t> copy = copied_from_device();
            if (copy_.empty()) copy_ = std::move(copy);  // another thread may have been faster, and lent its copy
        }
        return read_message(copy_.data(), copy_.size());
    }

    py::buffer_info bytes() {
        const MessageView message = view();
        const uint8_t* begin = message.payload - kHeaderBytes;
        return py::buffer_info(const_cast<uint8_t*>(begin), 1, py::format_descriptor<uint8_t>::format(), 1,
                               {static_cast<py::ssize_t>(message.nbytes())}, {1}, true);
    }

  private:
    std::vector<uint8_t> copied_from_device() const {
        const ReleasedGil release;
        const DeviceScope scope(buffer_->device);
        if (buffer_->capacity < kHeaderBytes)
            throw MessageError("a buffer of " + std::to_string(buffer_->capacity) + " bytes holds no message");
        uint8_t head[kHeaderBytes];
        CUDA_TRY(cudaMemcpy(head, buffer_->on_device, kHeaderBytes, cudaMemcpyDeviceToHost));
        uint64_t payload_bytes;
        std::memcpy(&payload_bytes, head + kPayloadBytesAt, 8);
        const uint64_t most = buffer_->capacity - kHeaderBytes;
        std::vector<uint8_t> copy(kHeaderBytes + std::min(payload_bytes, most));
        CUDA_TRY(cudaMemcpy(copy.data(), buffer_->on_device, copy.size(), cudaMemcpyDeviceToHost));
        return copy;
    }

    std::shared_ptr<MessageBuffer> buffer_;
    py::object keeps_;
    std::vector<uint8_t> copy_;
};

// A device buffer of the caller's for messages: uint8, contiguous, 16-byte aligned.
struct LentBytes {
    uint8_t* data;
    uint64_t size;
    int device;
};

LentBytes lent_bytes(const py::object& array, const char* role) {
    const int device = device_of(array);
    if (device < 0 || !py::hasattr(array, "__cuda_array_interface__"))
        throw py::value_error(std::string(role) +
                              " must be an array of uint8 on a CUDA device (with the CUDA array interface)");
    const py::dict interface = array.attr("__cuda_array_interface__");
    if (interface["typestr"].cast<std::string>() != "|u1")
        throw py::type_error(std::string(role) + " must be uint8, not " + interface["typestr"].cast<std::string>());
    if (interface.contains("strides") && !interface["strides"].is_none() &&
        interface["strides"].cast<std::vector<int64_t>>() != std::vector<int64_t>{1})
        refuse_layout(role);
    uint64_t size = 1;
    for (const auto length : interface["shape"].cast<std::vector<int64_t>>()) size *= static_cast<uint64_t>(length);
    const auto address = interface["data"].cast<std::pair<uintptr_t, bool>>().first;
    return {reinterpret_cast<uint8_t*>(address), size, device};
}

class PyEncoder {
  public:
    PyEncoder(int device, uint64_t numel, bool float64, const py::dict& policy, double threshold, double trend,
              double deviation, uint32_t supply, bool keeps_residual)
        : float64_(float64), encoder_([&, words = policy_of(policy)] {
              const ReleasedGil release;  // allocates, and waits for the device
              const cuda::PolicyState state{threshold, trend, deviation, cuda::Supply{supply}};
              const Dtype dtype = float64 ? Dtype::kFloat64 : Dtype::kFloat32;
              return cuda::DeviceEncoder(device, numel, dtype, words, state, keeps_residual);
          }()) {}

    // Use memory of the caller's as the residual, until None is lent in its place.
    void lend_residual(const py::object& residual) {
        void* memory = nullptr;
        if (!residual.is_none()) {
            const DeviceArrays lent(residual, "residual", encoder_.device(), nullptr);
            lent.require_targets();
            lent.require_numel(encoder_.numel());
            const std::vector<Array> arrays = lent.targets();
            if (arrays.size() != 1 || arrays[0].dtype != encoder_.dtype() ||
                reinterpret_cast<uintptr_t>(arrays[0].data) % 16 != 0)
                throw py::value_error(
                    "residual must be one array of the encoder's dtype that begins at a multiple of 16 bytes");
            memory = arrays[0].data;
        }
        const Exclusive exclusive(busy_);
        encoder_.lend_residual(memory);
    }

    // Return the size of a buffer for ternary messages.
    uint64_t capacity() const { return cuda::message_capacity(max_ternary_bytes(encoder_.numel())); }

    // Messages, one without a partition, are appended to a list of the caller's: what is returned is lost if a signal
    // interrupts the call. `outs` is a list of as many arrays, or None. 0 bytes are no budget.
    void encode(const py::object& update, uint32_t key, bool skip_nonfinite, const std::string& dense,
                const py::object& partition, uint64_t max_bytes, uint64_t most_changed, const py::object& outs,
                uintptr_t stream_number, py::list messages) {
        const cudaStream_t stream = stream_of(stream_number);
        const DenseType type = dense.empty() ? DenseType::kNone : dense_type(dense, encoder_.dtype());
        const Partition parts = partition.is_none() ? undivided(encoder_.numel()) : partition_of(partition);
        std::vector<ConstArray> updates;
        std::unique_ptr<DeviceArrays> arrays;
        const Exclusive exclusive(busy_);
        if (encoder_.numel() > 0 && !encoder_.residual())
            throw py::value_error("an encoder on a device needs memory for a residual");
        if (!update.is_none()) {
            arrays = std::make_unique<DeviceArrays>(update, "update", encoder_.device(), stream);
            arrays->require_update(encoder_.residual(), encoder_.numel(), encoder_.dtype());
            updates = arrays->updates();
        }
        py::list encoded;
        std::vector<MessageBuffer*> to(parts.parts);
        for (uint64_t i = 0; i < parts.parts; ++i) {
            const py::object out = outs.is_none() ? py::none() : py::object(outs[py::int_(i)]);
            const uint64_t position = partition.is_none() ? i : position_of(partition, i);
            const uint64_t numel = numel_of({parts, position});
            const uint64_t bytes =
                type == DenseType::kNone ? max_ternary_bytes(numel) : kHeaderBytes + numel * bytes_per_value(type);
            const std::shared_ptr<MessageBuffer> buffer =
                buffer_for(out, cuda::message_capacity(bytes), type == DenseType::kNone);
            to[position] = buffer.get();
            encoded.append(PyMessage(buffer, out));
        }
        {
            const ReleasedGil release;
            cuda::Budget budget;
            if (max_bytes > 0) budget = {max_bytes, most_changed};
            encoder_.encode(arrays ? &updates : nullptr, key, skip_nonfinite, type, parts, budget, to, stream);
        }
        for (const py::handle message : encoded) messages.append(message);
    }

    // Throw as `encode` does where an update does not fit; take nothing.
    void check_update(const py::object& update, uintptr_t stream_number) {
        DeviceArrays(update, "update", encoder_.device(), stream_of(stream_number))
            .require_update(encoder_.residual(), encoder_.numel(), encoder_.dtype());
    }

    // Wait for the device.
    py::dict state() {
        const Exclusive exclusive(busy_);
        cuda::EncoderState state{};
        {
            const ReleasedGil release;
            state = encoder_.state();
        }
        py::dict words;
        words["threshold"] = state.threshold;
        words["trend"] = state.trend;
        words["deviation"] = state.deviation;
        words["supply"] = static_cast<uint32_t>(state.supply);
        words["step"] = state.step;
        words["changed_at"] = state.changed_at;
        words["messages"] = state.messages;
        words["message_bytes"] = state.message_bytes;
        words["sent_count"] = state.sent;
        words["nonfinite_count"] = state.nonfinite_total;
        words["clipped_count"] = state.clipped;
        words["clipped_sum"] = state.clipped_sum;
        return words;
    }
    void set_state(double threshold, uint64_t step, uint64_t changed_at, double trend, double deviation,
                   uint32_t supply) {
        const Exclusive exclusive(busy_);
        const ReleasedGil release;
        encoder_.set_state({threshold, trend, deviation, cuda::Supply{supply}}, step, changed_at);
    }

    void set_policy(const py::dict& policy) {
        const Exclusive exclusive(busy_);
        encoder_.set_policy(policy_of(policy));
    }

    // Both functions wait for the device, because any stream may write to the residual.
    py::array residual_to_host() {
        const Exclusive exclusive(busy_);
        const std::vector<py::ssize_t> shape{static_cast<py::ssize_t>(encoder_.numel())};
        py::array host(float64_ ? py::dtype::of<double>() : py::dtype::of<float>(), shape);
        void* to = host.mutable_data();
        const ReleasedGil release;
        copy(to, encoder_.residual(), cudaMemcpyDeviceToHost);
        return host;
    }
    void residual_from_host(const py::array& host) {
        const Exclusive exclusive(busy_);
        if (static_cast<uint64_t>(host.nbytes()) != encoder_.numel() * (float64_ ? 8 : 4) ||
            !(host.flags() & py::array::c_style))
            throw py::value_error("the residual to load has another size or layout");
        const void* from = host.data();
        const ReleasedGil release;
        copy(encoder_.residual(), from, cudaMemcpyHostToDevice);
    }
    static OwnArray residual(const py::object& self) {
        auto& own = self.cast<PyEncoder&>();
        return {self, own.encoder_.residual(), own.encoder_.numel(), own.float64_ ? "<f8" : "<f4",
                own.encoder_.device()};
    }

  private:
    static cuda::Policy policy_of(const py::dict& words) {
        cuda::Policy policy;
        const auto read = [&](const char* name, auto& value) {
            if (words.contains(name)) value = words[name].cast<std::decay_t<decltype(value)>>();
        };
        uint32_t rule = 0;
        read("rule", rule);
        policy.rule = static_cast<cuda::Rule>(rule);
        read("reach", policy.rounding_point);
        read("minimum", policy.minimum);
        read("density_min", policy.density_min);
        read("density_max", policy.density_max);
        read("decay", policy.decay);
        read("step", policy.step);
        read("trigger", policy.trigger);
        read("delay", policy.delay);
        read("density", policy.density);
        read("shakeup_every", policy.shakeup_every);
        read("shakeup_divisor", policy.shakeup_divisor);
        read("clip_every", policy.clip_every);
        read("clip_limit", policy.clip_limit);
        return policy;
    }
    void copy(void* to, const void* from, cudaMemcpyKind kind) const {
        const DeviceScope scope(encoder_.device());
        CUDA_TRY(cudaDeviceSynchronize());
        CUDA_TRY(cudaMemcpy(to, from, encoder_.numel() * (float64_ ? 8 : 4), kind));
    }
    // The caller's memory is looked up by its address, so that an encode inside a graph allocates nothing.
    std::shared_ptr<MessageBuffer> buffer_for(const py::object& out, uint64_t needed, bool reused) {
        if (out.is_none()) {
            std::shared_ptr<cuda::BufferPool> once;
            std::shared_ptr<cuda::BufferPool>& pool = reused ? pools_[needed] : once;
            if (!pool) pool = std::make_shared<cuda::BufferPool>(encoder_.device(), needed);
            return pool->acquire();
        }
        const LentBytes lent = lent_bytes(out, "out");
        if (lent.device != encoder_.device())
            throw py::value_error("out is on cuda:" + std::to_string(lent.device) +
                                  ", but this encoder is on cuda:" + std::to_string(encoder_.device()));
        if (lent.size < needed)
            throw py::value_error("out has " + std::to_string(lent.size) + " bytes, must have at least " +
                                  std::to_string(needed));
        if (reinterpret_cast<uintptr_t>(lent.data) % 16 != 0)
            throw py::value_error("out must begin at a multiple of 16 bytes");
        std::shared_ptr<MessageBuffer>& known = lent_[lent.data];
        if (!known || known->capacity != lent.size) known = cuda::borrow_buffer(lent.device, lent.data, lent.size);
        return known;
    }

    bool float64_;
    cuda::DeviceEncoder encoder_;
    std::map<uint64_t, std::shared_ptr<cuda::BufferPool>> pools_;  // by capacity
    std::map<uint8_t*, std::shared_ptr<MessageBuffer>> lent_;
    std::atomic_flag busy_ = ATOMIC_FLAG_INIT;
};

// The working memory of encode_into, kept for each device, size, dtype and stream.
struct Borrowing {
    cuda::DeviceEncoder encoder;
    std::shared_ptr<MessageBuffer> buffer;
};

Borrowing& workspace_for(const LentBytes& out, uint64_t numel, Dtype dtype, cudaStream_t stream) {
    using Key = std::tuple<int, uint64_t, Dtype, cudaStream_t>;
    static auto& known = *new std::map<Key, std::unique_ptr<Borrowing>>;  // guarded by the GIL
    std::unique_ptr<Borrowing>& found = known[{out.device, numel, dtype, stream}];
    if (!found)
        found.reset(new Borrowing{cuda::DeviceEncoder(out.device, numel, dtype),
                                  cuda::borrow_buffer(out.device, out.data, out.size)});
    found->buffer->on_device = out.data;
    found->buffer->capacity = out.size;
    return *found;
}

void encode_into(const py::object& residual, const py::object& update, double threshold, uint32_t key, uint32_t step,
                 const py::object& out, uintptr_t number) {
    const cudaStream_t stream = stream_of(number);
    const LentBytes lent = lent_bytes(out, "out");
    const DeviceArrays own(residual, "residual", lent.device, stream);
    own.require_targets();
    const std::vector<Array> target = own.targets();
    if (target.size() != 1 || reinterpret_cast<uintptr_t>(target[0].data) % 16 != 0)
        throw py::value_error("residual must be one array that begins at a multiple of 16 bytes");
    const DeviceArrays arrays(update, "update", lent.device, stream);
    arrays.require_update(target[0].data, target[0].numel, target[0].dtype);
    const uint64_t needed = cuda::message_capacity(max_ternary_bytes(target[0].numel));
    if (lent.size < needed || reinterpret_cast<uintptr_t>(lent.data) % 16 != 0)
        throw py::value_error("out must have at least " + std::to_string(needed) +
                              " bytes and begin at a multiple of 16");
    Borrowing& work = workspace_for(lent, target[0].numel, target[0].dtype, stream);
    work.encoder.encode_into(target[0].data, arrays.updates(), float_to_bfloat16(static_cast<float>(threshold)), key,
                             step, *work.buffer, stream);
}

PyMessage message_at(const py::object& array) {
    const LentBytes lent = lent_bytes(array, "buffer");
    return PyMessage(cuda::borrow_buffer(lent.device, lent.data, lent.size), array);
}

// Host bytes on their way to a device.
class Upload {
  public:
    Upload(const py::buffer_info& bytes, cudaStream_t stream)
        : size_(static_cast<uint64_t>(bytes.size * bytes.itemsize)), memory_(size_, stream) {
        CUDA_TRY(cudaMemcpyAsync(memory_.get(), bytes.ptr, size_, cudaMemcpyHostToDevice, stream));
    }
    cuda::DeviceMessageRef ref() const { return {memory_.get(), size_, nullptr}; }

  private:
    uint64_t size_;
    cuda::StreamMemory memory_;
};

void require_numel(const MessageView& message, const Part& part) {
    if (message.header.numel != numel_of(part))
        throw MessageError("a message has " + std::to_string(message.header.numel) + " elements, its target or part " +
                           std::to_string(numel_of(part)));
}

// A message is a CudaMessage, which is read after its last use, or an object with the buffer protocol whose bytes have
// been checked on the host.
void apply_many(const py::list& messages, const py::object& target, double scale, const py::object& part, int device,
                uintptr_t number) {
    const cudaStream_t stream = stream_of(number);
    const DeviceArrays arrays(target, "target", device, stream);
    arrays.require_targets();
    const Part own = part_of(part).value_or(Part{undivided(arrays.numel()), 0});
    arrays.require_numel(own.partition.numel);
    if (!std::isfinite(scale)) throw py::value_error("scale is " + std::to_string(scale) + ", must be finite");
    const std::vector<Array> targets = arrays.targets();
    const DeviceScope scope(device);
    std::vector<cuda::DeviceMessageRef> refs;
    std::vector<MessageBuffer*> used;
    std::vector<Upload> uploads;
    bool from_host = false;
    for (const py::handle message : messages) {
        if (!py::isinstance<PyMessage>(message)) {
            const py::buffer_info bytes = py::reinterpret_borrow<py::buffer>(message).request();
            require_numel(read_message(static_cast<const uint8_t*>(bytes.ptr), static_cast<uint64_t>(bytes.size)), own);
            uploads.emplace_back(bytes, stream);
            refs.push_back(uploads.back().ref());
            from_host = true;
            continue;
        }
        MessageBuffer& buffer = message.cast<PyMessage&>().buffer();
        if (buffer.device != device)
            throw py::value_error("a message is on cuda:" + std::to_string(buffer.device) +
                                  ", but the target is on cuda:" + std::to_string(device));
        arrays.require_apart(buffer.on_device, buffer.capacity, "the message");
        refs.push_back({buffer.on_device, buffer.capacity, buffer.status});
        used.push_back(&buffer);
    }
    for (MessageBuffer* buffer : used) buffer->begin_use(stream);
    {
        const ReleasedGil release;
        cuda::apply_on_device(device, refs, targets, own, scale, stream);
        // The copy of pinned host bytes, which belong to the caller, is asynchronous.
        if (from_host) CUDA_TRY(cudaStreamSynchronize(stream));
    }
    for (MessageBuffer* buffer : used) buffer->end_use(stream);
}

void add_moved(const py::object& copies, const py::object& params, int device, uintptr_t number) {
    const cudaStream_t stream = stream_of(number);
    const DeviceArrays floats(copies, "copies", device, stream);
    const DeviceArrays halves(params, "params", device, stream);
    const std::vector<HalfArray> pairs = half_arrays(floats, halves);
    const ReleasedGil release;
    cuda::add_moved_on_device(device, pairs, stream);
}

void register_message(py::module_& module) {
    py::class_<PyMessage> message(
        module, "CudaMessage", py::buffer_protocol(),
        "A message in device memory. Reading its bytes or fields waits for the device, and raises if "
        "the update or the message was refused.");
    define_fields(message);
    message.def_buffer(&PyMessage::bytes)
        .def_static("at", &message_at, py::arg("buffer"),
                    "Return the message in an array of uint8 on a device; it is checked when it is applied.")
        .def("check", &PyMessage::check)
        .def_property_readonly("device", [](const PyMessage& m) { return m.buffer().device; })
        .def_property_readonly("memory", [](const py::object& self) {
            MessageBuffer& b = self.cast<PyMessage&>().buffer();
            return OwnArray(self, b.on_device, b.capacity, "|u1", b.device);
        });
}

void register_encoder(py::module_& module) {
    // Local, because _core's class has the same C++ name, which is all that pybind11 compares under libc++.
    py::class_<PyEncoder>(module, "Encoder", py::module_local())
        .def(py::init<int, uint64_t, bool, const py::dict&, double, double, double, uint32_t, bool>(),
             py::arg("device"), py::arg("numel"), py::arg("float64"), py::arg("policy"), py::arg("threshold"),
             py::arg("trend"), py::arg("deviation"), py::arg("supply"), py::arg("keeps_residual"))
        .def("lend_residual", &PyEncoder::lend_residual, py::arg("residual").none(true))
        .def("encode", &PyEncoder::encode, py::arg("update").none(true), py::arg("key"), py::arg("skip_nonfinite"),
             py::arg("dense"), py::arg("partition").none(true), py::arg("max_bytes"), py::arg("most_changed"),
             py::arg("outs").none(true), py::arg("stream"), py::arg("messages"))
        .def("check_update", &PyEncoder::check_update, py::arg("update"), py::arg("stream"))
        .def("state", &PyEncoder::state)
        .def("set_state", &PyEncoder::set_state, py::arg("threshold"), py::arg("step"), py::arg("changed_at"),
             py::arg("trend"), py::arg("deviation"), py::arg("supply"))
        .def("set_policy", &PyEncoder::set_policy, py::arg("policy"))
        .def("residual_to_host", &PyEncoder::residual_to_host)
        .def("residual_from_host", &PyEncoder::residual_from_host, py::arg("residual"))
        .def_property_readonly("capacity", &PyEncoder::capacity)
        .def_property_readonly("residual", &PyEncoder::residual);
}

}  // namespace
}  // namespace gradwire::bindings

PYBIND11_MODULE(_cuda, module) {
    namespace bindings = gradwire::bindings;
    pybind11::register_exception_translator(bindings::translate);
    pybind11::register_exception_translator(bindings::translate_cuda);
    bindings::register_own_array(module);
    bindings::register_message(module);
    bindings::register_encoder(module);
    module.def("apply_many", &bindings::apply_many, pybind11::arg("messages"), pybind11::arg("target"),
               pybind11::arg("scale"), pybind11::arg("part").none(true), pybind11::arg("device"),
               pybind11::arg("stream"));
    module.def("add_moved", &bindings::add_moved, pybind11::arg("copies"), pybind11::arg("params"),
               pybind11::arg("device"), pybind11::arg("stream"));
    module.def("encode_into", &bindings::encode_into, pybind11::arg("residual"), pybind11::arg("update"),
               pybind11::arg("threshold"), pybind11::arg("key"), pybind11::arg("step"), pybind11::arg("out"),
               pybind11::arg("stream"));
    module.def("device_of", &bindings::device_of, pybind11::arg("array"));
    module.def("unusable", &bindings::unusable);
}
