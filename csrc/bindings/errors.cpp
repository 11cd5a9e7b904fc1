#include "errors.h"

#include <pybind11/pybind11.h>

#include "../common/error.h"

namespace gradwire::bindings {

namespace py = pybind11;

void set_error(const char* name, const char* what) {
    py::set_error(py::module_::import("gradwire.errors").attr(name), what);
}

void translate(std::exception_ptr pointer) {
    try {
        if (pointer) std::rethrow_exception(pointer);
    } catch (const MessageError& error) {
        set_error("MessageError", error.what());
    } catch (const BackendUnavailable& error) {
        set_error("BackendUnavailable", error.what());
    } catch (const NonFiniteUpdate& error) {
        const py::object type = py::module_::import("gradwire.errors").attr("NonFiniteUpdate");
        const py::object value = type(error.what(), error.count, error.first_index);
        PyErr_SetObject(type.ptr(), value.ptr());
    }
}

}  // namespace gradwire::bindings
