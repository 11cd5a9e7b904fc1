// The module gradwire._core: check the inputs, release the GIL once, call the core.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cmath>
#include <optional>

#include "../apply.h"
#include "../common/scalars.h"
#include "../cpu/kernels.h"
#include "../dense.h"
#include "../encoder.h"
#include "../half_precision.h"
#include "errors.h"
#include "exclusive.h"
#include "parts.h"
#include "py_arrays.h"
#include "py_message.h"
#include "released_gil.h"

namespace gradwire::bindings {
namespace {

// Check that arrays have the sizes and dtypes of others and do not overlap them.
void require_alike(const HostArrays& arrays, const std::string& name, const std::vector<Array>& others,
                   const std::string& name_of_others) {
    arrays.require_targets();
    const std::vector<Array> own = arrays.targets();
    const auto alike = [](const Array& one, const Array& other) {
        return one.numel == other.numel && one.dtype == other.dtype;
    };
    if (!std::equal(own.begin(), own.end(), others.begin(), others.end(), alike))
        throw py::value_error(name_of_others + " and " + name + " must be arrays of the same sizes and dtypes");
    arrays.require_apart(others, "the " + name_of_others);
}

class PyEncoder {
  public:
    PyEncoder(uint64_t numel, bool float64, unsigned threads)
        : encoder_(nullptr, numel, float64 ? Dtype::kFloat64 : Dtype::kFloat32, threads) {
        kernels();  // throws if GRADWIRE_ISA names an unusable instruction set
    }

    // Messages are appended to a list of the caller's: what is returned is lost if a signal interrupts the call.
    py::tuple encode(const py::object& update, const py::object& before, double threshold, double rounding_point,
                     uint8_t flags, uint32_t key, uint32_t step, bool skip_nonfinite, const py::object& partition,
                     uint64_t max_bytes, uint64_t most_changed, py::list messages) {
        EncodeOptions options;
        options.threshold = float_to_bfloat16(static_cast<float>(threshold));
        options.rounding_point = rounding_point;
        options.flags = flags;
        options.key = key;
        options.step = step;
        options.skip_nonfinite = skip_nonfinite;
        if (max_bytes > 0) {
            options.max_bytes = max_bytes;
            options.most_changed = most_changed;
        }
        const Partition parts = partition_or_whole(partition);
        Encoded encoded =
            with_input(update, before, [&](const Input& input) { return encoder_.encode(input, options, parts); });
        append_messages(encoded, partition, messages);
        return py::make_tuple(encoded.skipped, encoded.reached);
    }

    py::tuple sample(const py::object& update, const py::object& before, double threshold, double rounding_point,
                     double density, uint64_t turn) {
        SampledQuantiles sampled;
        const uint16_t rounded = float_to_bfloat16(static_cast<float>(threshold));
        with_input(update, before, [&](const Input& input) {
            sampled = encoder_.sample(input, rounded, rounding_point, density, turn);
            return Encoded{};
        });
        return py::make_tuple(sampled.now / rounding_point, sampled.shuffled / rounding_point,
                              sampled.next / rounding_point, sampled.same / rounding_point, sampled.agreement,
                              sampled.moving, sampled.floor / rounding_point);
    }

    uint64_t encode_dense(const py::object& update, const py::object& before, const std::string& dtype, uint32_t key,
                          uint32_t step, bool skip_nonfinite, const py::object& partition, py::list messages) {
        EncodeOptions options;
        options.key = key;
        options.step = step;
        options.skip_nonfinite = skip_nonfinite;
        const DenseType type = dense_type(dtype, encoder_.dtype());
        const Partition parts = partition_or_whole(partition);
        Encoded encoded = with_input(
            update, before, [&](const Input& input) { return encoder_.encode_dense(input, type, options, parts); });
        append_messages(encoded, partition, messages);
        return encoded.skipped;
    }

    // Throw as `encode` does where an update does not fit; take nothing.
    void check_update(const py::object& update) {
        HostArrays(update, "update").require_update(encoder_.residual(), encoder_.numel(), encoder_.dtype());
    }

    // The totals are kept here, as what is returned is lost if a signal interrupts the call.
    void clip(double limit) {
        const Exclusive exclusive(busy_);
        Clipped now;
        {
            const ReleasedGil release;
            now = encoder_.clip(limit);
        }
        clipped_.count += now.count;
        clipped_.sum += now.sum;
    }
    py::tuple clipped() const { return py::make_tuple(clipped_.count, clipped_.sum); }

    // Return a view of the residual; allocate a residual of zeros if there is none.
    py::array keep_residual() {
        const Exclusive exclusive(busy_);
        {
            const ReleasedGil release;  // a transport's thread must not wait for gigabytes of zeros
            encoder_.keep_residual();
        }
        using Owner = std::shared_ptr<uint8_t[]>;
        const py::capsule owner(new Owner(encoder_.own_residual()),
                                [](void* memory) { delete static_cast<Owner*>(memory); });
        const py::dtype dtype = encoder_.dtype() == Dtype::kFloat64 ? py::dtype::of<double>() : py::dtype::of<float>();
        return py::array(dtype, {static_cast<py::ssize_t>(encoder_.numel())}, {dtype.itemsize()}, encoder_.residual(),
                         owner);
    }

    void drop_residual() {
        const Exclusive exclusive(busy_);
        encoder_.drop_residual();
    }

  private:
    Partition partition_or_whole(const py::object& partition) const {
        return partition.is_none() ? undivided(encoder_.numel()) : partition_of(partition);
    }
    static void append_messages(Encoded& encoded, const py::object& partition, py::list& messages) {
        const size_t parts = encoded.messages.size();
        for (size_t i = 0; i < parts; ++i)
            messages.append(Message(std::move(encoded.messages[partition.is_none() ? i : position_of(partition, i)])));
    }

    template <class F>
    Encoded with_input(const py::object& update, const py::object& before, F f) {
        const Exclusive exclusive(busy_);  // while arrays lend their memory, other threads of Python run
        if (before.is_none() && !encoder_.residual())
            throw py::value_error("an encoder without a residual encodes differences only");
        if (update.is_none() && before.is_none()) {
            const ReleasedGil release;
            return f(Input{});
        }
        const HostArrays arrays(update, "update");
        if (before.is_none()) {
            arrays.require_update(encoder_.residual(), encoder_.numel(), encoder_.dtype());
            return with_arrays(arrays, nullptr, f);
        }
        const HostArrays earlier(before, "before");
        arrays.require_targets();
        require_alike(earlier, "before", arrays.targets(), "update");
        for (const HostArrays* each : {&arrays, &earlier}) {
            each->require_numel(encoder_.numel());
            if (encoder_.residual())
                each->require_apart(encoder_.residual(), encoder_.numel() * bytes_per_element(encoder_.dtype()),
                                    "the residual");
        }
        return with_arrays(arrays, &earlier, f);
    }

    template <class F>
    Encoded with_arrays(const HostArrays& update, const HostArrays* before, F f) {
        const std::vector<ConstArray> values = update.updates();
        const std::vector<ConstArray> earlier = before ? before->updates() : std::vector<ConstArray>{};
        const ReleasedGil release;
        return f(Input{&values, before ? &earlier : nullptr});
    }

    Encoder encoder_;
    Clipped clipped_;
    std::atomic_flag busy_ = ATOMIC_FLAG_INIT;
};

// Encode from the caller's residual, without an encoder; elements that are not finite are left out.
Message encode_into(const py::object& residual, const py::object& update, double threshold, uint32_t key,
                    uint32_t step) {
    const HostArrays own(residual, "residual");
    own.require_targets();
    const std::vector<Array> target = own.targets();
    if (target.size() != 1) throw py::value_error("residual must be one array");
    const HostArrays arrays(update, "update");
    arrays.require_update(target[0].data, target[0].numel, target[0].dtype);
    const std::vector<ConstArray> updates = arrays.updates();
    EncodeOptions options;
    options.threshold = float_to_bfloat16(static_cast<float>(threshold));
    options.key = key;
    options.step = step;
    options.skip_nonfinite = true;
    const ReleasedGil release;
    Encoder encoder(target[0].data, target[0].numel, target[0].dtype, 1);
    return Message(std::move(encoder.encode(&updates, options).messages[0]));
}

unsigned checked_threads(int64_t threads) {
    constexpr int64_t kMost = 1024;
    if (threads < 1 || threads > kMost)
        throw py::value_error("threads must be 1 to " + std::to_string(kMost) + ", got " + std::to_string(threads));
    return static_cast<unsigned>(threads);
}

// Check messages against their target arrays. `apply_messages` compares messages of a part with that part's numel.
std::vector<MessageView> views_for(const HostArrays& arrays, const std::vector<const Message*>& messages, double scale,
                                   const std::optional<Part>& part = {}) {
    arrays.require_targets();
    if (part) arrays.require_numel(part->partition.numel);
    if (!std::isfinite(scale)) throw py::value_error("scale is " + std::to_string(scale) + ", must be finite");
    std::vector<MessageView> views;
    views.reserve(messages.size());
    for (const Message* message : messages) {
        const MessageView& view = message->view();
        if (!part) arrays.require_numel(view.header.numel);
        arrays.require_apart(message->bytes(), view.nbytes(), "the message");
        if (!std::isfinite(static_cast<float>(scale * static_cast<double>(view.threshold()))))
            throw py::value_error("scale " + std::to_string(scale) + " times threshold " +
                                  std::to_string(view.threshold()) + " overflows float32");
        views.push_back(view);
    }
    return views;
}

void apply_all(const std::vector<const Message*>& messages, const py::object& target, double scale, int64_t threads,
               const py::object& part) {
    const HostArrays arrays(target, "target");
    std::optional<Part> own = part_of(part);
    const std::vector<MessageView> views = views_for(arrays, messages, scale, own);
    const std::vector<Array> targets = arrays.targets();
    if (!own) own = {undivided(arrays.numel()), 0};
    const unsigned count = checked_threads(threads);
    const ReleasedGil release;
    apply_messages(views, targets, *own, scale, nullptr, count);
}

void apply_to_both(const std::vector<const Message*>& messages, const py::object& target, const py::object& second,
                   size_t own, double scale, int64_t threads) {
    const HostArrays arrays(target, "target");
    const HostArrays others(second, "second");
    const std::vector<MessageView> views = views_for(arrays, messages, scale);
    views_for(others, messages, scale);
    const std::vector<Array> targets = arrays.targets();
    require_alike(others, "second", targets, "target");
    const SecondTarget second_target{others.targets(), own};
    const unsigned count = checked_threads(threads);
    const ReleasedGil release;
    apply_messages(views, targets, scale, &second_target, count);
}

void apply_with_momentum_to(const std::vector<const Message*>& messages, const py::object& target,
                            const py::object& velocity, double momentum, double scale, const py::object& second,
                            size_t own, int64_t threads) {
    if (!std::isfinite(momentum)) throw py::value_error("momentum is not finite");
    const HostArrays arrays(target, "target");
    const HostArrays velocities(velocity, "velocity");
    const HostArrays others(second, "second");
    const std::vector<MessageView> views = views_for(arrays, messages, scale);
    views_for(velocities, messages, scale);
    const std::vector<Array> targets = arrays.targets();
    require_alike(velocities, "velocity", targets, "target");
    const Momentum outer{velocities.targets(), momentum};
    const SecondTarget second_target{others.targets(), own};
    const bool has_second = !second_target.targets.empty();
    if (has_second) {
        views_for(others, messages, scale);
        require_alike(others, "second", targets, "target");
        require_alike(others, "second", outer.velocity, "velocity");
    }
    const unsigned count = checked_threads(threads);
    const ReleasedGil release;
    apply_with_momentum(views, targets, scale, outer, has_second ? &second_target : nullptr, count);
}

py::array decode(const Message& message) {
    const Header& header = message.view().header;
    const bool float64 = header.dtype == DenseType::kFloat64;
    const py::object zeros = py::module_::import("numpy").attr("zeros");
    py::array values = zeros(header.numel, float64 ? "float64" : "float32");
    if (header.kind == Kind::kDense) {
        void* out = values.mutable_data();
        const ReleasedGil release;
        decode_dense(message.view(), out);
    } else {
        apply_all({&message}, values, 1.0, 1, py::none());
    }
    return values;
}

Message dense(const py::object& values, const std::string& dtype, uint32_t key, uint32_t step) {
    const HostArrays arrays(values, "values");
    const std::vector<ConstArray> parts = arrays.updates();
    if (parts.size() != 1 || (parts[0].dtype != Dtype::kFloat32 && parts[0].dtype != Dtype::kFloat64))
        throw py::type_error("values must be one float32 or float64 array");
    const DenseType type = dense_type(dtype, parts[0].dtype);
    const ReleasedGil release;
    return Message(encode_dense(parts, type, key, step));
}

void add_moved_params(const py::object& copies, const py::object& params, int64_t threads) {
    const HostArrays floats(copies, "copies");
    const HostArrays halves(params, "params");
    const std::vector<HalfArray> pairs = half_arrays(floats, halves);
    const unsigned count = checked_threads(threads);
    const ReleasedGil release;
    add_moved(pairs, count);
}

void round_copies_to_params(const py::object& copies, const py::object& params, int64_t threads) {
    const HostArrays floats(copies, "copies");
    const HostArrays halves(params, "params");
    const std::vector<HalfArray> pairs = half_arrays(floats, halves);
    halves.require_writable();
    for (const HalfArray& pair : pairs)
        if (pair.dtype != Dtype::kBfloat16) throw py::type_error("params must be bfloat16");
    const unsigned count = checked_threads(threads);
    const ReleasedGil release;
    round_copies(pairs, count);
}

uint64_t max_message_bytes(uint64_t numel, bool dense, const std::string& dtype) {
    if (numel > kMaxNumel) throw py::value_error("numel is " + std::to_string(numel) + ", must be at most 2^48");
    if (!dense) return max_ternary_bytes(numel);
    return kHeaderBytes + numel * (dtype == "float64" ? 8 : dtype == "bfloat16" ? 2 : 4);
}

void register_encoder(py::module_& module) {
    py::class_<PyEncoder>(module, "Encoder")
        .def(py::init<uint64_t, bool, unsigned>(), py::arg("numel"), py::arg("float64"), py::arg("threads"))
        .def("encode", &PyEncoder::encode, py::arg("update").none(true), py::arg("before").none(true),
             py::arg("threshold"), py::arg("rounding_point"), py::arg("flags"), py::arg("key"), py::arg("step"),
             py::arg("skip_nonfinite"), py::arg("partition"), py::arg("max_bytes"), py::arg("most_changed"),
             py::arg("messages"))
        .def("sample", &PyEncoder::sample, py::arg("update").none(true), py::arg("before").none(true),
             py::arg("threshold"), py::arg("rounding_point"), py::arg("density"), py::arg("turn"))
        .def("encode_dense", &PyEncoder::encode_dense, py::arg("update").none(true), py::arg("before").none(true),
             py::arg("dtype"), py::arg("key"), py::arg("step"), py::arg("skip_nonfinite"), py::arg("partition"),
             py::arg("messages"))
        .def("check_update", &PyEncoder::check_update, py::arg("update"))
        .def("clip", &PyEncoder::clip, py::arg("limit"))
        .def("clipped", &PyEncoder::clipped)
        .def("keep_residual", &PyEncoder::keep_residual)
        .def("drop_residual", &PyEncoder::drop_residual);
    module.def("encode_into", &encode_into, py::arg("residual"), py::arg("update"), py::arg("threshold"),
               py::arg("key"), py::arg("step"));
}

void register_apply(py::module_& module) {
    module.def("apply_many", &apply_all, py::arg("messages"), py::arg("target"), py::arg("scale"), py::arg("threads"),
               py::arg("part"));
    module.def("apply_to_both", &apply_to_both, py::arg("messages"), py::arg("target"), py::arg("second"),
               py::arg("own"), py::arg("scale"), py::arg("threads"));
    module.def("apply_with_momentum", &apply_with_momentum_to, py::arg("messages"), py::arg("target"),
               py::arg("velocity"), py::arg("momentum"), py::arg("scale"), py::arg("second"), py::arg("own"),
               py::arg("threads"));
    module.def("add_moved", &add_moved_params, py::arg("copies"), py::arg("params"), py::arg("threads"));
    module.def("round_copies", &round_copies_to_params, py::arg("copies"), py::arg("params"), py::arg("threads"));
    module.def("decode", &decode, py::arg("message"));
    module.def("dense", &dense, py::arg("values"), py::arg("dtype"), py::arg("key"), py::arg("step"));
    module.def("max_message_bytes", &max_message_bytes, py::arg("numel"), py::arg("dense") = false,
               py::arg("dtype") = "float32");
}

void register_dispatch(py::module_& module) {
    module.def("usable_isas", &usable_isas);
    module.def("isa", [] { return kernels().name; });
    module.def("select_isa", &select_isa, py::arg("name"));
    module.def("cuda_status", [] { return GRADWIRE_CUDA_STATUS; });
}

}  // namespace
}  // namespace gradwire::bindings

PYBIND11_MODULE(_core, module) {
    namespace bindings = gradwire::bindings;
    pybind11::register_exception_translator(bindings::translate);
    bindings::register_message(module);
    bindings::register_encoder(module);
    bindings::register_apply(module);
    bindings::register_dispatch(module);
}
