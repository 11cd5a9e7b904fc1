// The Python class Message: owned bytes, or a view of a borrowed buffer.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "../message.h"

namespace gradwire::bindings {

namespace py = pybind11;

class Message {
  public:
    explicit Message(MessageBytes own);
    Message(MessageView view, std::shared_ptr<Py_buffer> borrowed);

    const MessageView& view() const { return view_; }
    const uint8_t* bytes() const { return view_.payload - kHeaderBytes; }

  private:
    MessageBytes own_;
    std::shared_ptr<Py_buffer> borrowed_;
    MessageView view_;
};

void register_message(py::module_& module);

}  // namespace gradwire::bindings
