// The exceptions of the core as the Python classes of the same name, for both modules.
#pragma once

#include <exception>

namespace gradwire::bindings {

// For pybind11::register_exception_translator.
void translate(std::exception_ptr pointer);

// Set the Python exception gradwire.errors.<name>.
void set_error(const char* name, const char* what);

}  // namespace gradwire::bindings
