#include "released_gil.h"

#include <pthread.h>
#include <unistd.h>

// glibc ends a thread by unwinding its stack. A `catch (...)` stops that only where the unwinder is libgcc's, and the
// wheels are linked with another one. A cleanup handler runs before any frame of C++ is reached, if it is none itself.
#ifdef __EXCEPTIONS
#error "to be compiled with -fno-exceptions"
#endif

namespace gradwire::bindings {
namespace {

void wait_for_the_end(void*) {
    for (;;) sleep(3600);
}

}  // namespace

void restore_thread(PyThreadState* state) {
    pthread_cleanup_push(wait_for_the_end, nullptr);
    PyEval_RestoreThread(state);
    pthread_cleanup_pop(0);
}

}  // namespace gradwire::bindings
