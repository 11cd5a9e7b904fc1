// Runs a function on a few threads. The threads live for one call, so that nothing breaks after a fork. Starting them
// takes 20 us, which is little for the millions of elements that justify a second thread.
#pragma once

#include <algorithm>
#include <cstdint>
#include <exception>
#include <thread>
#include <vector>

namespace gradwire {

// Call f(0) ... f(count - 1) at the same time, as far as there are threads; rethrow the first exception once all have
// ended.
template <class F>
void run_parallel(unsigned count, F f) {
    if (count == 1) return f(0U);
    std::vector<std::exception_ptr> failures(count);
    const auto guarded = [&](unsigned i) {
        try {
            f(i);
        } catch (...) {
            failures[i] = std::current_exception();
        }
    };
    std::vector<std::thread> others;
    others.reserve(count - 1);
    for (unsigned i = 1; i < count; ++i) {
        try {
            others.emplace_back(guarded, i);
        } catch (...) {  // a container may allow few threads; an exception would end the process while others run
            guarded(i);
        }
    }
    guarded(0);
    for (std::thread& other : others) other.join();
    for (const std::exception_ptr& failure : failures)
        if (failure) std::rethrow_exception(failure);
}

// Cut [0, size) into `count` parts and call f(part, begin, end) for all of them at the same time.
template <class F>
void run_parts(uint64_t size, unsigned count, F f) {
    const auto begin = [&](unsigned i) { return size / count * i + std::min<uint64_t>(i, size % count); };
    run_parallel(count, [&](unsigned i) { f(i, begin(i), begin(i + 1)); });
}

}  // namespace gradwire
