// The fields of a message as properties, for the classes of messages in host memory and on a device.
#pragma once

#include <pybind11/pybind11.h>

#include "../message.h"

namespace gradwire::bindings {

// `AnyMessage` has view(), which returns a MessageView.
template <class AnyMessage>
void define_fields(pybind11::class_<AnyMessage>& message) {
    const auto field = [](auto member) { return [member](AnyMessage& m) { return m.view().header.*member; }; };
    const auto density = [](AnyMessage& m) {
        const Header h = m.view().header;
        return h.numel > 0 ? static_cast<double>(h.count) / static_cast<double>(h.numel) : 0.0;
    };
    const auto to_bytes = [](AnyMessage& m) {
        const MessageView view = m.view();
        return pybind11::bytes(reinterpret_cast<const char*>(view.payload - kHeaderBytes), view.nbytes());
    };
    message
        .def_property_readonly(
            "kind", [](AnyMessage& m) { return kind_name(m.view()); },
            "\"sparse\", \"bitmap\" (every chunk is one) or \"dense\".")
        .def_property_readonly("key", field(&Header::key), "Index of the group of parameters.")
        .def_property_readonly("step", field(&Header::step), "The encoder's step, modulo 2^32.")
        .def_property_readonly("numel", field(&Header::numel), "Elements in the update.")
        .def_property_readonly("count", field(&Header::count), "Changed elements.")
        .def_property_readonly(
            "threshold", [](AnyMessage& m) { return m.view().threshold(); },
            "The amount added to or subtracted from every changed element; 0.0 in a dense message.")
        .def_property_readonly(
            "is_shakeup", [](AnyMessage& m) { return (m.view().header.flags & kFlagShakeUp) != 0; },
            "Whether this is a periodic message with a smaller threshold.")
        .def_property_readonly("density", density, "count / numel; 0.0 without elements.")
        .def_property_readonly(
            "nbytes", [](AnyMessage& m) { return m.view().nbytes(); }, "Bytes, the header's 48 included.")
        .def("__bytes__", to_bytes);
}

}  // namespace gradwire::bindings
