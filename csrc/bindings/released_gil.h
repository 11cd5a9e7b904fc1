// Lets other threads of Python run while this one computes.
#pragma once

#include <Python.h>

namespace gradwire::bindings {

// PyEval_RestoreThread, but for the end of the process: up to Python 3.13 a daemon thread that asks for the GIL then is
// ended, which would abort the process in a destructor. Such a thread waits here until the process is gone, as Python
// itself lets it from 3.14 on.
void restore_thread(PyThreadState* state);

// What py::gil_scoped_release does, with `restore_thread`.
class ReleasedGil {
  public:
    ReleasedGil() : state_(PyEval_SaveThread()) {}
    ~ReleasedGil() { restore_thread(state_); }
    ReleasedGil(const ReleasedGil&) = delete;
    ReleasedGil& operator=(const ReleasedGil&) = delete;

  private:
    PyThreadState* state_;
};

}  // namespace gradwire::bindings
