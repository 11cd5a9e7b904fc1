// A team of threads on the CPU: each phase runs for one thread after the other, forwards or backwards. A thread that
// reads what another thread writes in the same phase gives different results in the two orders, and the tests run both.
#pragma once

#include <cstdint>

#include "cuda/team.h"

namespace support {

template <unsigned kThreads_>
class EmulatedTeam {
  public:
    static constexpr unsigned kThreads = kThreads_;
    template <class T>
    struct Local {
        T values[kThreads];
        T& operator[](unsigned thread) { return values[thread]; }
        const T& operator[](unsigned thread) const { return values[thread]; }
    };

    explicit EmulatedTeam(bool backwards) : backwards_(backwards) {}

    template <class F>
    void each(F f) {
        for (unsigned i = 0; i < kThreads; ++i) f(backwards_ ? kThreads - 1 - i : i);
    }
    template <class Op>
    uint64_t exclusive_scan(Local<uint64_t>& values, uint64_t identity, Op op) {
        uint64_t all = identity;
        for (uint64_t& value : values.values) {
            const uint64_t own = value;
            value = all;
            all = op(all, own);
        }
        return all;
    }
    uint32_t ballot(const Local<bool>& values) {
        static_assert(kThreads == 32, "only a warp votes");
        uint32_t votes = 0;
        for (unsigned i = 0; i < kThreads; ++i) votes |= uint32_t{values[i]} << i;
        return votes;
    }
    uint64_t sum(const Local<uint64_t>& values) {
        uint64_t all = 0;
        for (const uint64_t value : values.values) all += value;
        return all;
    }

  private:
    bool backwards_;
};

}  // namespace support
