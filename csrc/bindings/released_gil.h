// Lets other threads of Python run while this one computes.
#pragma once

#include <Python.h>

#include <chrono>
#include <thread>

namespace gradwire::bindings {

// What py::gil_scoped_release does, but for the end of the process: up to Python 3.13 a daemon thread that asks for the
// GIL then is ended by unwinding its stack, which no destructor lets through, so that std::terminate aborts the
// process. Such a thread waits here until the process is gone, as Python itself lets it from 3.14 on.
class ReleasedGil {
  public:
    ReleasedGil() : state_(PyEval_SaveThread()) {}
    ~ReleasedGil() {
        try {
            PyEval_RestoreThread(state_);
        } catch (...) {
            for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
        }
    }
    ReleasedGil(const ReleasedGil&) = delete;
    ReleasedGil& operator=(const ReleasedGil&) = delete;

  private:
    PyThreadState* state_;
};

}  // namespace gradwire::bindings
