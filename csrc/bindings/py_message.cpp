#include "py_message.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <cmath>
#include <cstring>

#include "../common/error.h"
#include "../common/scalars.h"
#include "../entry_list.h"
#include "../ternary_encoder.h"
#include "message_fields.h"
#include "released_gil.h"

namespace gradwire::bindings {
namespace {

std::shared_ptr<Py_buffer> borrow_bytes(const py::object& buffer) {
    auto view = std::shared_ptr<Py_buffer>(new Py_buffer{}, [](Py_buffer* held) {
        PyBuffer_Release(held);
        delete held;
    });
    if (PyObject_GetBuffer(buffer.ptr(), view.get(), PyBUF_C_CONTIGUOUS) != 0) {
        view->obj = nullptr;
        throw py::error_already_set();
    }
    return view;
}

Message parse_at(const std::shared_ptr<Py_buffer>& buffer, uint64_t at) {
    const auto* bytes = static_cast<const uint8_t*>(buffer->buf);
    const MessageView view = read_message(bytes + at, static_cast<uint64_t>(buffer->len) - at);
    {
        const ReleasedGil release;
        validate(view);
    }
    return Message(view, buffer);
}

Message parse(const py::object& buffer) {
    const std::shared_ptr<Py_buffer> held = borrow_bytes(buffer);
    Message message = parse_at(held, 0);
    const auto trailing = static_cast<uint64_t>(held->len) - message.view().nbytes();
    if (trailing > 0)
        throw MessageError(std::to_string(trailing) + " bytes follow the message of " +
                           std::to_string(message.view().nbytes()) + " bytes; parse_many splits a concatenation");
    return message;
}

// Return a message that this process has encoded, without looking at its payload; who applies it does.
Message view_message(const py::object& buffer) {
    const std::shared_ptr<Py_buffer> held = borrow_bytes(buffer);
    return Message(read_message(static_cast<const uint8_t*>(held->buf), static_cast<uint64_t>(held->len)), held);
}

py::list parse_many(const py::object& buffer) {
    const std::shared_ptr<Py_buffer> held = borrow_bytes(buffer);
    py::list messages;
    for (uint64_t at = 0; at < static_cast<uint64_t>(held->len);) {
        Message message = parse_at(held, at);
        at += message.view().nbytes();
        messages.append(std::move(message));
    }
    return messages;
}

Header header_for(uint64_t numel, double threshold, uint32_t key, uint32_t step, bool shakeup) {
    Header header;
    header.numel = numel;
    header.threshold = float_to_bfloat16(static_cast<float>(threshold));
    header.key = key;
    header.step = step;
    header.flags = shakeup ? kFlagShakeUp : 0;
    if (!(threshold > 0) || !std::isfinite(threshold) ||
        static_cast<double>(bfloat16_to_float(header.threshold)) != threshold)
        throw MessageError("threshold " + std::string(py::str(py::float_(threshold))) +
                           " is not a positive bfloat16 value, which is what a message can carry");
    return header;
}

using Positions = py::array_t<int64_t, py::array::c_style>;
using Signs = py::array_t<bool, py::array::c_style>;

Message from_entries(const Positions& positions, const Signs& negative, uint64_t numel, double threshold, uint32_t key,
                     uint32_t step, bool shakeup) {
    if (positions.ndim() != 1 || negative.ndim() != 1 || positions.size() != negative.size())
        throw py::value_error("positions and negative must be one-dimensional and of one length, not " +
                              std::to_string(positions.size()) + " and " + std::to_string(negative.size()));
    if (numel > kMaxNumel) throw py::value_error("numel is " + std::to_string(numel) + ", must be at most 2^48");
    const auto* minus = reinterpret_cast<const uint8_t*>(negative.data());  // any byte but 0 is NumPy's True
    std::vector<MaskWord> words;
    int64_t before = -1;
    for (py::ssize_t i = 0; i < positions.size(); ++i) {
        const int64_t position = positions.data()[i];
        if (position <= before || position >= static_cast<int64_t>(numel))
            throw py::value_error("positions[" + std::to_string(i) + "] is " + std::to_string(position) +
                                  "; positions must rise and lie in [0, " + std::to_string(numel) + ")");
        before = position;
        const auto at = static_cast<uint64_t>(position);
        if (words.empty() || words.back().index != at / 64) words.push_back({at / 64, 0, 0});
        words.back().changed |= uint64_t{1} << (at % 64);
        words.back().negative |= uint64_t{minus[i] != 0} << (at % 64);
    }
    return Message(TernaryEncoder().encode(words.data(), words.size(), static_cast<uint64_t>(positions.size()),
                                           header_for(numel, threshold, key, step, shakeup)));
}

py::tuple entries(const Message& message) {
    const MessageView& view = message.view();
    if (view.header.kind == Kind::kDense) throw MessageError("a dense message has no entries; use gradwire.decode");
    auto positions = py::array_t<int64_t>(static_cast<py::ssize_t>(view.header.count));
    auto negative = py::array_t<bool>(static_cast<py::ssize_t>(view.header.count));
    list_entries(view, positions.mutable_data(), negative.mutable_data());
    return py::make_tuple(positions, negative);
}

std::string represent(const Message& message) {
    const Header& h = message.view().header;
    return "<gradwire.Message " + std::string(kind_name(message.view())) + " key=" + std::to_string(h.key) +
           " step=" + std::to_string(h.step) + " count=" + std::to_string(h.count) + "/" + std::to_string(h.numel) +
           " nbytes=" + std::to_string(message.view().nbytes()) + ">";
}

bool same_bytes(const Message& a, const Message& b) {
    return a.view().nbytes() == b.view().nbytes() && std::memcmp(a.bytes(), b.bytes(), a.view().nbytes()) == 0;
}

py::buffer_info buffer_of(const Message& message) {
    return py::buffer_info(const_cast<uint8_t*>(message.bytes()), 1, py::format_descriptor<uint8_t>::format(), 1,
                           {static_cast<py::ssize_t>(message.view().nbytes())}, {1}, true);
}

}  // namespace

Message::Message(MessageBytes own) : own_(std::move(own)), view_(own_.view()) {}
Message::Message(MessageView view, std::shared_ptr<Py_buffer> borrowed) : borrowed_(std::move(borrowed)), view_(view) {}

void register_message(py::module_& module) {
    py::class_<Message> message(
        module, "Message", py::buffer_protocol(),
        "One encoded update: self-describing bytes, owned or a view of the buffer they were parsed from.\n\n"
        "bytes(message) copies the bytes, memoryview(message) is a read-only view of them.");
    define_fields(message);
    message.def_buffer(&buffer_of)
        .def_static(
            "parse", &parse, py::arg("buffer"),
            "Return the single message in `buffer`, fully checked and without a copy.\n\n"
            "Args:\n    buffer: contiguous bytes, which must not change while the message is in use; kept alive.\n\n"
            "Raises:\n    MessageError: the bytes are not a valid message, or more bytes follow.")
        .def_static("from_entries", &from_entries, py::arg("positions"), py::arg("negative"), py::kw_only(),
                    py::arg("numel"), py::arg("threshold"), py::arg("key") = 0, py::arg("step") = 0,
                    py::arg("shakeup") = false,
                    "Return the ternary message that changes the given elements.\n\n"
                    "Args:\n    positions: int64[count], ascending.\n    negative: bool[count], true for minus.\n\n"
                    "Raises:\n    MessageError: the threshold is not a positive bfloat16 value.\n"
                    "    ValueError: positions are not ascending or outside [0, numel).")
        .def("entries", &entries,
             "Return the changed elements of a ternary message: int64[count] positions, ascending, and bool[count], "
             "true for minus.")
        .def("__eq__", &same_bytes, py::is_operator())
        .def("__repr__", &represent)
        .def("__reduce__", [](const py::object& self) {
            // pickle does not support functions of pybind11, such as Message.parse.
            const py::object parse =
                py::module_::import("operator").attr("methodcaller")("parse", self.attr("__bytes__")());
            return py::make_tuple(parse, py::make_tuple(py::type::of(self)));
        });
    module.def("parse_many", &parse_many, py::arg("buffer"),
               "Return the messages in `buffer`, one after the other, checked as by Message.parse.");
    module.def("view_message", &view_message, py::arg("buffer"));
}

}  // namespace gradwire::bindings
